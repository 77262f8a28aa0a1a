"""`ridgeline route URL …`: one address in front of several OpenAI-compatible servers."""

from __future__ import annotations

import argparse
import signal
import sys

from ridgeline.cli.cmd_serve import require_authentication
from ridgeline.cli.config_options import add_options, options_of
from ridgeline.process.log import get_logger
from ridgeline.process.standard_streams import say
from ridgeline.route.fleet import Fleet, replica_keys
from ridgeline.route.route_options import RouteOptions
from ridgeline.route.route_process import run as run_router
from ridgeline.server.http.keys import load_keys
from ridgeline.version import __version__

logger = get_logger("route")

# Titles of `--help` -> options; the others are under "router".
GROUPS = {
    "security": ("api_key_file", "insecure_no_auth", "allowed_host", "allowed_origins", "ssl_certfile", "ssl_keyfile"),
    "limits": (
        "retries", "health_interval", "health_failures", "max_queued_requests", "max_connections", "max_body_bytes",
        "request_timeout", "stall_timeout", "drain_timeout",
    ),
    "logs": ("access_log",),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s URL [URL ...] [options]"
    parser.add_argument("urls", nargs="+", metavar="URL", help="a replica, such as http://10.0.0.1:8000")
    add_options(parser, RouteOptions, "router", GROUPS)
    parser.epilog = (
        "API keys for the replicas come from RIDGELINE_ROUTE_KEY, or RIDGELINE_ROUTE_KEY_1, _2, ... for one of them. "
        "docs/router.md has the rest."
    )


def run(args: argparse.Namespace) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))        # until the router has its own handler
    options = options_of(RouteOptions, args)
    keys = load_keys(options.as_server())
    require_authentication(options.as_server(), keys)
    fleet = Fleet(args.urls, options, replica_keys(len(args.urls)))

    def on_ready(fleet: Fleet, address: str) -> None:
        if not say(welcome(fleet, address)):
            logger.warning("ready: %s/v1 (standard output cannot be written to)", address)

    run_router(fleet, keys, on_ready)
    print("stopped", file=sys.stderr, flush=True)


def welcome(fleet: Fleet, address: str) -> str:
    return "\n".join([
        f"ridgeline {__version__}: routes by {fleet.options.policy} to",
        *(f"  {replica.url}" for replica in fleet.replicas),
        f"ready: {address}/v1  (Ctrl-C stops)",
        f"dashboard: {address}/dashboard  replicas: {address}/replicas  metrics: {address}/metrics",
        "",
    ])
