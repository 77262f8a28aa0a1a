"""`ridgeline admin`: sends one command to a running server through its admin socket."""

from __future__ import annotations

import argparse
import json
import socket
import sys
from typing import Any

from ridgeline.errors import BadRequest, ConfigError

_SECONDS = 30.0                      # the engine answers between two steps
_PROFILE_SECONDS = 90.0              # a profile is answered after its steps have run and their trace is written


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("socket", metavar="SOCKET", help="the path that `ridgeline serve --admin-socket PATH` was given")
    parser.add_argument("command", choices=("techniques", "switch", "load", "profile"),
                        help="list techniques, switch one, show the load, or profile steps")
    parser.add_argument("technique", nargs="?", default="", help="for switch: name of the technique, quoted if it has a space")
    parser.add_argument("state", nargs="?", choices=("on", "off"), help="for switch: the new state")
    parser.add_argument("--steps", type=int, default=64, metavar="N", help="for profile: number of steps (default: 64)")


def run(args: argparse.Namespace) -> None:
    if (args.command == "switch") != bool(args.technique and args.state):
        raise ConfigError("switch needs a technique and on or off; the other commands need neither")
    if args.command == "profile":
        print(json.dumps(profile(args.socket, args.steps)))
        return
    print(json.dumps(ask(args.socket, {"command": args.command, "technique": args.technique, "on": args.state != "off"})))


def profile(path: str, steps: int) -> dict[str, Any]:
    """Profiles this number of steps. Returns the trace's path and the cost model's prediction for those steps."""
    if steps < 1:
        raise ConfigError(f"--steps must be at least 1, got {steps}")
    notice = f"waiting for {steps} steps: an idle server runs none, so send requests meanwhile"
    return ask(path, {"command": "profile", "steps": steps}, _PROFILE_SECONDS, notice)


def ask(path: str, asked: dict[str, object], seconds: float = _SECONDS, notice: str = "") -> dict[str, Any]:
    """Raises BadRequest with the server's message if the server refuses. `notice` is printed once there is a server."""
    answer = _ask(path, asked, seconds, notice)
    if "error" in answer:
        raise BadRequest(answer["error"])
    return answer


def _ask(path: str, asked: dict[str, object], seconds: float, notice: str) -> dict[str, Any]:
    if path.startswith(("http://", "https://")):
        raise ConfigError(f"{path} is a URL; admin takes the path that `ridgeline serve --admin-socket PATH` was given")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(seconds)
        try:
            link.connect(path)
            link.sendall(json.dumps(asked).encode() + b"\n")
            if notice:
                print(notice, file=sys.stderr)
            with link.makefile("rb") as lines:
                return dict(json.loads(lines.readline()))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"no server answers at {path}: {reason}") from None
