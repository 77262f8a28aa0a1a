"""Paths come to the router decoded, and go to a replica encoded: a client writes no line of the router's request."""

from __future__ import annotations

import json
from urllib.parse import unquote

import pytest
from fake_replica import Behaviour, FakeReplica, Router
from test_delivery import CHAT, SAID, routed


@pytest.mark.reliability("H-03b")
@pytest.mark.parametrize("name", [
    "Qwen/Qwen3-8B", "x HTTP/1.1\r\nx-injected: yes\r\ny: ", "x\r\n\r\nPOST /v1/completions HTTP/1.1", "x\ny", "a b", "a?b=c#d",
    "5\u20ac", "\ufffd", "%2e%2e", "\x00",
])
def test_the_name_of_a_model_is_one_part_of_one_line(name: str) -> None:
    """A name with line breaks was a second request, with the router's key, whose answer the next client got."""
    async def test(router: Router, replica: FakeReplica) -> None:
        assert (await router.ask(None, f"/v1/models/{name}")).status == 200
        assert (await router.ask(None, "/v1/models")).status == 200
        first, second = replica.seen
        assert unquote(first.path) == f"/v1/models/{name}" and "?" not in first.path and second.path == "/v1/models"
        assert "x-injected" not in first.headers and "y" not in first.headers

    routed(test, FakeReplica(), replica_keys=("secret",))


@pytest.mark.reliability("H-03b")
@pytest.mark.parametrize("name", ["..", "../../metrics", "a/../../../admin", ".", "./../.."])
def test_no_path_leads_out_of_the_list_of_models(name: str) -> None:
    async def test(router: Router, replica: FakeReplica) -> None:
        assert (await router.ask(None, f"/v1/models/{name}")).status == 404 and not replica.seen

    routed(test, FakeReplica())


def test_a_request_that_comes_back_goes_no_further() -> None:
    """A name that leads back to its router: one request took all connections, in as many rounds."""
    async def test(router: Router, replica: FakeReplica) -> None:
        assert (await router.ask(CHAT, via="1.1 proxy")).status == 200
        via = replica.seen[0].headers["via"]
        assert via.startswith("1.1 proxy, 1.1 ridgeline-")
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/models", None)):
            back = await router.ask(body, path, via=via + ", 1.1 another")
            assert back.status == 508 and "leads back" in json.loads(back.body)["error"]["message"]
        assert len(replica.seen) == 1 and (await router.ask(None, "/health", via=via)).status == 200
        other = Router(replica)
        assert (await other.ask(CHAT, via=via)).status == 200
        other.fleet.close()

    routed(test, FakeReplica())


def test_a_replica_that_sends_requests_back_is_one_that_refuses_them() -> None:
    """Two routers, each of which has the other among its replicas."""
    async def test(router: Router, *replicas: FakeReplica) -> None:
        for _ in range(4):
            assert (await router.ask(CHAT)).text == SAID
        assert router.fleet.replicas[0].up

    routed(test, FakeReplica(Behaviour(status=508)), FakeReplica())
