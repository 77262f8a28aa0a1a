"""The options of `ridgeline route`. Those that a server has, too, have its names and meanings (server/options.py)."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ridgeline.config import option
from ridgeline.engine.replicas.policies import POLICIES
from ridgeline.server.options import ServerOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteOptions:
    policy: str = option(
        "predicted", "how a replica is chosen: by predicted seconds, in turn, or the one with the fewest requests", POLICIES
    )
    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8080, "port to listen on; 0: any free one", low=0)
    allowed_host: str = option("", "further host names and addresses that the router answers to, separated by commas; *: any")
    health_interval: int = option(5, "seconds between two checks of a replica's /health", low=1)
    health_failures: int = option(3, "failures in a row after which a replica counts as down", low=1)
    retries: int = option(2, "further replicas that a request may be sent to when one has taken it and failed", low=0)
    max_queued_requests: int = option(4096, "requests that may be under way at once", low=1)
    max_connections: int = option(4096, "open connections of clients, including idle ones", low=1)
    max_body_bytes: int = option(16 * 2**20, "largest request body in bytes", low=1)
    request_timeout: int = option(600, "seconds that a request may take, including its wait; 0: no limit", low=0)
    stall_timeout: int = option(
        120, "seconds without any of a replica's answers, after which its begun streams end or go elsewhere; 0: no limit", low=0
    )
    drain_timeout: int = option(30, "seconds that running requests get to finish when the router stops", low=0)
    api_key_file: str = option("", "file with API keys, one per line; RIDGELINE_API_KEY holds keys too, separated by commas")
    insecure_no_auth: bool = option(False, "allow listening on a public address without API keys")
    allowed_origins: str = option("", "origins whose web pages may use the router, separated by commas; *: all")
    ssl_certfile: str = option("", "certificate chain (PEM) for HTTPS; needs ssl_keyfile")
    ssl_keyfile: str = option("", "private key (PEM) for HTTPS; needs ssl_certfile")
    access_log: str = option("", "file for one line of JSON per request, without prompts or keys; -: stderr")

    def as_server(self) -> ServerOptions:
        """For the parts of the server that the router uses, too."""
        own = {each.name for each in fields(self)}
        return ServerOptions(**{each.name: getattr(self, each.name) for each in fields(ServerOptions) if each.name in own})
