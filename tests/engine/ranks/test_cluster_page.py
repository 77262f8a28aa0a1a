"""The manifests of docs/cluster.md: they parse, agree with each other and with the Dockerfile, and their commands are ours."""

from __future__ import annotations

import argparse
import re
import shlex
import textwrap
import tomllib
from typing import Any

import pytest
import yaml
from folders import ROOT

from ridgeline.cli.cmd_serve import add_arguments, require_authentication
from ridgeline.cli.config_options import engine_config, options_of
from ridgeline.config import EngineConfig
from ridgeline.errors import ConfigError
from ridgeline.server.http.keys import VARIABLE, Keys
from ridgeline.server.options import ServerOptions

PAGE = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def manifests() -> list[dict[str, Any]]:
    """Indented blocks that begin with a key of YAML."""
    blocks = re.findall(r"(?m)(?:^    (?:services|apiVersion):.*\n)(?:^    .*\n|^\n(?=    {2,} ))*", PAGE)
    return [yaml.safe_load(textwrap.dedent(block)) for block in blocks]


COMPOSE, JOB, SERVICE = manifests()
CLUSTER = JOB["spec"]["rayClusterSpec"]
HEAD, (WORKERS,) = CLUSTER["headGroupSpec"], CLUSTER["workerGroupSpecs"]


def served(command: str) -> tuple[argparse.Namespace, EngineConfig, ServerOptions]:
    """What `ridgeline serve` makes of a command; an option that it does not know ends the test."""
    program, serve, *words = shlex.split(command)
    assert (program, serve) == ("ridgeline", "serve")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(words)
    return args, engine_config(args), options_of(ServerOptions, args)


IN_COMPOSE = "ridgeline " + COMPOSE["services"]["ridgeline"]["command"]      # the image's entry point comes first
IN_JOB = JOB["spec"]["entrypoint"]


@pytest.mark.parametrize("command", [IN_COMPOSE, IN_JOB])
def test_commands_are_understood_and_listen_where_others_reach_them(command: str) -> None:
    _, config, server = served(command)
    assert config.parallel.num_ranks == 2
    assert (server.host, server.port) == ("0.0.0.0", 8000)


def test_the_compose_file_agrees_with_the_dockerfile() -> None:
    service, (_, _, server) = COMPOSE["services"]["ridgeline"], served(IN_COMPOSE)
    assert f"docker build --tag {service['image']} ." in DOCKERFILE and 'ENTRYPOINT ["ridgeline"]' in DOCKERFILE
    assert service["ports"] == [f"{server.port}:{server.port}"] and f"EXPOSE {server.port}\n" in DOCKERFILE
    home = re.search(r"(?m)^WORKDIR (/home/\w+)$", DOCKERFILE)
    (volume,) = service["volumes"]
    assert home and volume.split(":")[1] == f"{home[1]}/.cache/huggingface"      # the command names a model of the hub
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device["count"] == served(IN_COMPOSE)[1].parallel.num_ranks and device["capabilities"] == ["gpu"]


def container(group: dict[str, Any]) -> dict[str, Any]:
    (found,) = group["template"]["spec"]["containers"]
    return dict(found)


def test_the_job_has_a_gpu_for_each_rank() -> None:
    _, config, _ = served(IN_JOB)
    assert (JOB["apiVersion"], JOB["kind"], config.parallel.distributed_executor_backend) == ("ray.io/v1", "RayJob", "ray")
    assert WORKERS["minReplicas"] == WORKERS["replicas"] == WORKERS["maxReplicas"]       # an autoscaler takes no rank away
    gpus = [container(group)["resources"]["limits"]["nvidia.com/gpu"] for group in (HEAD, *[WORKERS] * WORKERS["replicas"])]
    assert gpus == [config.parallel.tensor_parallel_size] * config.parallel.pipeline_parallel_size


@pytest.mark.parametrize("group", [HEAD, WORKERS], ids=["head", "worker"])
def test_every_pod_has_the_image_and_the_model(group: dict[str, Any]) -> None:
    args, _, _ = served(IN_JOB)
    own = container(group)
    (built,) = re.findall(r"`docker build --tag (\S+)`", PAGE)
    assert own["image"] == built
    (mount,), (volume,) = own["volumeMounts"], group["template"]["spec"]["volumes"]
    assert args.model.startswith(mount["mountPath"] + "/") and mount["name"] == volume["name"]
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]["ray"]
    assert f"'{extra[0].replace('ray', 'ray[default]')}'" in PAGE


def test_the_service_finds_the_head_alone() -> None:
    assert (SERVICE["apiVersion"], SERVICE["kind"]) == ("v1", "Service")
    labels = HEAD["template"]["metadata"]["labels"]
    assert SERVICE["spec"]["selector"] == labels and "metadata" not in WORKERS["template"]
    (port,), (own,) = SERVICE["spec"]["ports"], container(HEAD)["ports"]
    assert port["targetPort"] == own["name"] and own["containerPort"] == served(IN_JOB)[2].port


@pytest.mark.parametrize("command", [IN_COMPOSE, IN_JOB])
def test_servers_have_the_key_without_which_they_do_not_start(command: str) -> None:
    _, _, server = served(command)
    with pytest.raises(ConfigError, match=VARIABLE):
        require_authentication(server, Keys())
    assert VARIABLE in COMPOSE["services"]["ridgeline"]["environment"]
    (variable,) = container(HEAD)["env"]
    secret = variable["valueFrom"]["secretKeyRef"]
    assert variable["name"] == VARIABLE
    assert f"kubectl create secret generic {secret['name']} --from-literal={secret['key']}=" in PAGE
