"""The manifests of docs/cluster.md parse, and the commands in them are commands of this engine."""

from __future__ import annotations

import re
import shlex
import textwrap
from typing import Any

import pytest
import yaml
from folders import ROOT

from ridgeline.config import EngineConfig, declared_options
from ridgeline.server.options import ServerOptions

PAGE = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")


def manifests() -> list[dict[str, Any]]:
    """Indented blocks that begin with a key of YAML."""
    blocks = re.findall(r"(?m)(?:^    (?:services|apiVersion):.*\n)(?:^    .*\n|^\n(?=    {2,} ))*", PAGE)
    return [yaml.safe_load(textwrap.dedent(block)) for block in blocks]


def commands() -> list[str]:
    compose, job, _ = manifests()
    return ["ridgeline " + compose["services"]["ridgeline"]["command"], job["spec"]["entrypoint"]]


def test_there_are_a_compose_file_a_job_and_its_service() -> None:
    compose, job, service = manifests()
    assert compose["services"]["ridgeline"]["deploy"]["resources"]["reservations"]["devices"][0]["count"] == 2
    assert (job["kind"], service["kind"]) == ("RayJob", "Service")
    groups = job["spec"]["rayClusterSpec"]
    head = groups["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert service["spec"]["ports"][0]["targetPort"] in {port["name"] for port in head["ports"]}
    gpus = [head["resources"]["limits"]["nvidia.com/gpu"]]
    for group in groups["workerGroupSpecs"]:
        assert group["minReplicas"] == group["replicas"] == group["maxReplicas"]     # an autoscaler takes no rank away
        gpus += [group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]] * group["replicas"]
    assert len(gpus) == int(options(job["spec"]["entrypoint"])["pipeline_parallel_size"]) and set(gpus) == {1}


def options(command: str) -> dict[str, str]:
    program, serve, _, *words = shlex.split(command)
    assert (program, serve) == ("ridgeline", "serve")
    return {name.removeprefix("--").replace("-", "_"): value for name, value in zip(words[::2], words[1::2], strict=True)}


@pytest.mark.parametrize("command", commands())
def test_every_option_of_a_command_is_known(command: str) -> None:
    of_engine = {declared.name for declared, _, _ in declared_options()}
    found = options(command)
    assert set(found) <= of_engine | set(ServerOptions.__dataclass_fields__) | {"host", "port"}
    sizes = {name: int(value) for name, value in found.items() if name.endswith("_size")}
    assert EngineConfig.of(**sizes).parallel.num_ranks == 2
