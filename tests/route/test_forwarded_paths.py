"""Paths come to the router decoded, and go to a replica encoded: a client writes no line of the router's request."""

from __future__ import annotations

from urllib.parse import unquote

import pytest
from fake_replica import FakeReplica, Router
from test_delivery import routed


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
