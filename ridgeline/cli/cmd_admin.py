"""`ridgeline admin`: ask something of a running server through its admin socket."""

from __future__ import annotations

import argparse
import json
import socket
from typing import Any

from ridgeline.errors import BadRequest, ConfigError

_SECONDS = 30.0                      # an answer comes between two steps
_PROFILE_SECONDS = 90.0              # that of a profile after its steps, and their trace is written first


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("socket", metavar="SOCKET", help="the path that the server was given as --admin-socket")
    parser.add_argument("command", choices=("techniques", "switch", "load", "profile"), help="what to ask")
    parser.add_argument("technique", nargs="?", default="", help="for switch: its name, in quotes where it has a space")
    parser.add_argument("state", nargs="?", choices=("on", "off"), help="for switch")
    parser.add_argument("--steps", type=int, default=64, metavar="N", help="for profile: how many (default: 64)")


def run(args: argparse.Namespace) -> None:
    if (args.command == "switch") != bool(args.technique and args.state):
        raise ConfigError("switch needs a technique and on or off; the other commands need neither")
    if args.command == "profile":
        print(json.dumps(profile(args.socket, args.steps)))
        return
    print(json.dumps(ask(args.socket, {"command": args.command, "technique": args.technique, "on": args.state != "off"})))


def profile(path: str, steps: int) -> dict[str, Any]:
    """The file with the trace of so many steps, and what the cost model says of them."""
    if steps < 1:
        raise ConfigError(f"--steps must be at least 1, got {steps}")
    return ask(path, {"command": "profile", "steps": steps}, _PROFILE_SECONDS)


def ask(path: str, asked: dict[str, object], seconds: float = _SECONDS) -> dict[str, Any]:
    """BadRequest when the server says that it cannot."""
    answer = _ask(path, asked, seconds)
    if "error" in answer:
        raise BadRequest(answer["error"])
    return answer


def _ask(path: str, asked: dict[str, object], seconds: float) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(seconds)
        try:
            link.connect(path)
            link.sendall(json.dumps(asked).encode() + b"\n")
            with link.makefile("rb") as lines:
                return dict(json.loads(lines.readline()))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"no server answers at {path}: {reason}") from None
