"""The compose file and the manifests of docs/replicas.md: their commands are ours, and ports, names, keys and volumes agree."""

from __future__ import annotations

import argparse
import re
import shlex
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from folders import ROOT

from ridgeline.cli import cmd_route, cmd_serve
from ridgeline.cli.config_options import options_of
from ridgeline.route.fleet import KEY_VARIABLE
from ridgeline.route.route_options import RouteOptions
from ridgeline.server.http.keys import VARIABLE
from ridgeline.server.options import ServerOptions

PAGE = (ROOT / "docs" / "replicas.md").read_text(encoding="utf-8")
COMPOSE, KUBERNETES = ([*yaml.safe_load_all(block)] for block in re.findall(r"(?s)```yaml\n(.*?)```", PAGE))
SERVICES = COMPOSE[0]["services"]
OBJECTS = {(each["kind"], each["metadata"]["name"]): each for each in KUBERNETES}


def parsed(words: list[str]) -> tuple[argparse.Namespace, Any]:
    """What the command makes of its words; an option that it does not know ends the test."""
    command, options = (cmd_serve, ServerOptions) if words[0] == "serve" else (cmd_route, RouteOptions)
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    args = parser.parse_args(words[1:])
    return args, options_of(options, args)


def of_compose(name: str) -> tuple[argparse.Namespace, Any]:
    return parsed(shlex.split(SERVICES[name]["command"]))


def test_the_router_of_the_compose_file_reaches_every_replica() -> None:
    args, router = of_compose("router")
    replicas = [name for name in SERVICES if name != "router"]
    assert args.urls == [f"http://{name}:{of_compose(name)[1].port}" for name in replicas]
    (published,) = SERVICES["router"]["ports"]
    assert published.split(":")[1] == str(router.port) and f"127.0.0.1:{published.split(':')[0]}/" in PAGE
    devices = [SERVICES[name]["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] for name in replicas]
    assert len({tuple(each) for each in devices}) == len(replicas)
    volumes = [volume.split(":")[0] for name in replicas for volume in SERVICES[name]["volumes"]]
    assert {name for name in volumes if not name.startswith("/")} == set(COMPOSE[0]["volumes"])


@pytest.mark.parametrize("name", SERVICES)
def test_the_health_check_of_the_image_asks_the_port_that_is_listened_on(name: str) -> None:
    _, options = of_compose(name)
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert options.host == "0.0.0.0" and f"http://127.0.0.1:{options.port}/health" in dockerfile
    assert SERVICES[name]["environment"][VARIABLE] and "image: ridgeline\n" in PAGE


def test_the_replicas_keys_are_those_that_the_router_sends() -> None:
    router = SERVICES["router"]["environment"]
    assert {SERVICES[name]["environment"][VARIABLE] for name in SERVICES if name != "router"} == {router[KEY_VARIABLE]}
    assert router[VARIABLE] != router[KEY_VARIABLE]
    (engine,), (router,) = (containers(kind, name) for kind, name in (("StatefulSet", "ridgeline"), ("Deployment", "router")))
    known = {key: each["env"] for key, each in (("engine", engine), ("router", router))}
    keys = {(where, each["name"]): each["valueFrom"]["secretKeyRef"] for where, variables in known.items() for each in variables}
    assert keys["engine", VARIABLE] == keys["router", KEY_VARIABLE] != keys["router", VARIABLE]
    secret = OBJECTS["Secret", "ridgeline-keys"]
    assert all(key["name"] == secret["metadata"]["name"] and key["key"] in secret["stringData"] for key in keys.values())


def containers(kind: str, name: str) -> list[dict[str, Any]]:
    return list(OBJECTS[kind, name]["spec"]["template"]["spec"]["containers"])


def test_the_router_of_the_manifest_reaches_every_pod() -> None:
    pods, service = OBJECTS["StatefulSet", "ridgeline"], OBJECTS["Service", "replicas"]
    (engine,), (router,) = containers("StatefulSet", "ridgeline"), containers("Deployment", "router")
    args, _ = parsed(router["args"])
    assert [urlsplit(url).hostname for url in args.urls] == [f"ridgeline-{n}.replicas" for n in range(pods["spec"]["replicas"])]
    _, listens = parsed(engine["args"])
    ports = {urlsplit(url).port for url in args.urls} | {each["port"] for each in service["spec"]["ports"]}
    assert ports | {each["containerPort"] for each in engine["ports"]} == {listens.port}
    assert pods["spec"]["serviceName"] == service["metadata"]["name"] and service["spec"]["clusterIP"] == "None"


@pytest.mark.parametrize(("kind", "name", "service"), [
    ("StatefulSet", "ridgeline", "replicas"), ("Deployment", "router", "ridgeline-api"),
])
def test_labels_probes_and_grace_of_pods(kind: str, name: str, service: str) -> None:
    spec, ((container,), selector) = OBJECTS[kind, name]["spec"], (containers(kind, name), OBJECTS["Service", service]["spec"])
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"] == selector["selector"]
    args, options = parsed(container["args"])
    probes = [container[probe]["httpGet"] for probe in ("readinessProbe", "livenessProbe") if probe in container]
    assert probes and {probe["port"] for probe in probes} == {options.port}
    assert selector["ports"][0].get("targetPort", selector["ports"][0]["port"]) == options.port
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] > options.drain_timeout
    mounts = [each["mountPath"] for each in container.get("volumeMounts", [])]
    assert kind == "Deployment" or any(args.model.startswith(f"{mount}/") for mount in mounts)
