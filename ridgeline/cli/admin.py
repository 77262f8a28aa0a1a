"""`ridgeline admin`: ask something of a running server through its admin socket."""

from __future__ import annotations

import argparse
import json
import socket

from ridgeline.errors import BadRequest, ConfigError

_SECONDS = 30.0                      # an answer comes between two steps


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("socket", metavar="SOCKET", help="the path that the server was given as --admin-socket")
    parser.add_argument("command", choices=("techniques", "switch", "load"), help="what to ask")
    parser.add_argument("technique", nargs="?", default="", help="for switch: its name, in quotes where it has a space")
    parser.add_argument("state", nargs="?", choices=("on", "off"), help="for switch")


def run(args: argparse.Namespace) -> None:
    if (args.command == "switch") != bool(args.technique and args.state):
        raise ConfigError("switch needs a technique and on or off; the other commands need neither")
    asked = {"command": args.command, "technique": args.technique, "on": args.state != "off"}
    answer = ask(args.socket, asked)
    if "error" in answer:
        raise BadRequest(answer["error"])
    print(json.dumps(answer))


def ask(path: str, asked: dict[str, object]) -> dict[str, str]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(_SECONDS)
        try:
            link.connect(path)
            link.sendall(json.dumps(asked).encode() + b"\n")
            with link.makefile("rb") as lines:
                return dict(json.loads(lines.readline()))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"no server answers at {path}: {reason}") from None
