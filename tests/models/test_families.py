"""Every family against transformers, on tiny random checkpoints: prefill and decode steps through the paged KV cache.

Equality is judged by rounding. A model's own rounding noise is how far its float32 logits lie from its float64 logits;
two correct float32 models differ by a few times that. In float64 the noise shrinks with the machine epsilon, to about
1e-13, which leaves no room for a formula that is merely close. transformers keeps norms, softmax and rotations in
float32 whatever the model's dtype, so its float64 run needs `AllFloat64`. Float64 decodes until a window holds decoded tokens
alone; float32, which has kernels of its own on a CPU, decodes three tokens.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_configs import CHECKPOINTS, MAX_POSITION, ORIGINAL_CONTEXT, WINDOW
from tiny_models import (
    PagedSequences,
    build_model,
    declared,
    is_known,
    load,
    random_tokens,
    save_config,
    spelled,
    teacher_forced_logits,
)
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ridgeline.errors import ModelError
from ridgeline.models.expert_config import Experts
from ridgeline.models.families.all_families import FAMILIES
from ridgeline.models.family import Family
from ridgeline.models.model_config import (
    ModelConfig,
    hf_model_config,
    kv_groups,
    layer_groups,
    load_model_config,
)
from ridgeline.models.rope import Rope

PREFILL, DECODE = 40, WINDOW + 2     # the last steps see nothing but decoded tokens through a window; blocks hold four
TOKENS = random_tokens(PREFILL + DECODE)
EPSILON_RATIO = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
MARGIN = 8                           # in units of one model's own noise: two models, and their different orders of sums
CLEARLY = 100                        # a switched-off flag must show this many times above the tolerance

# What is not a flag: names, and facts about files.
NOT_FLAGS = {
    "name", "architectures", "gguf", "defaults", "names", "gguf_names", "gguf_permuted", "prefixes", "ignored", "spelled", "only",
    "fused_experts", "gguf_also", "reworded", "not_text",
}


class AllFloat64(TorchFunctionMode):
    """Within it, code that asks for float32 gets float64."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        args = [torch.float64 if each is torch.float32 else each for each in args]
        kwargs = {key: torch.float64 if each is torch.float32 else each for key, each in (kwargs or {}).items()}
        return function(*args, **kwargs)

    def __enter__(self) -> AllFloat64:
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        torch.set_default_dtype(torch.float32)


@dataclass
class Case:
    """A checkpoint with transformers' logits for it, and the tolerances derived from the model's own noise."""

    path: Path
    newer: Path                      # the same, with config.json as transformers 5 spells it; `path`: as 4 does
    oracle32: Tensor
    oracle64: Tensor
    ours32: Tensor
    ours64: Tensor

    @property
    def tolerance32(self) -> float:
        return MARGIN * float((self.ours32 - self.ours64).abs().max())

    @property
    def tolerance64(self) -> float:
        return self.tolerance32 * EPSILON_RATIO


class Cases(dict[str, Case]):
    """By the name of a checkpoint, each made when it is asked for."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory

    def __missing__(self, name: str) -> Case:
        if name == "minicpm3-long" and tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 22):
            pytest.skip("this version of transformers computes MiniCPM3 with yarn only")
        if not is_known(name):
            pytest.skip(f"this version of transformers does not have {name}")
        newer = self.directory / f"{name} as transformers 5 spells it"
        with torch.no_grad():
            oracle32 = build_model(name)(torch.tensor([TOKENS]), use_cache=False).logits[0]
            with AllFloat64():
                model = build_model(name, torch.float64)
                oracle64 = model(torch.tensor([TOKENS]), use_cache=False).logits[0]
            model.save_pretrained(newer)
        path = spelled(name, Path(shutil.copytree(newer, self.directory / name)), spelling=4)
        spelled(name, newer, spelling=5)
        self[name] = Case(
            path, newer, oracle32, oracle64,
            teacher_forced_logits(load(path, torch.float32), TOKENS, len(TOKENS) - 3),
            teacher_forced_logits(load(path, torch.float64), TOKENS, PREFILL),
        )
        return self[name]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    return Cases(tmp_path_factory.mktemp("families"))


@pytest.mark.reliability("P-06")
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_agree(cases: dict[str, Case], name: str) -> None:
    case = cases[name]
    assert case.oracle32.std() >= 1
    assert PREFILL > WINDOW and PREFILL > ORIGINAL_CONTEXT and len(TOKENS) <= MAX_POSITION
    assert case.tolerance32 < 1e-3, "a model this noisy would prove nothing"
    assert float((case.ours32 - case.oracle32).abs().max()) <= case.tolerance32
    assert float((case.ours64 - case.oracle64).abs().max()) <= case.tolerance64


def test_every_family_is_covered() -> None:
    assert {declared(name) for name in CHECKPOINTS} == {family.architectures[0] for family in FAMILIES}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_both_spellings_are_the_same_model(cases: dict[str, Case], name: str) -> None:
    assert load_model_config(cases[name].path) == load_model_config(cases[name].newer)


# ---- every flag matters ----------------------------------------------------------------------------------------------


def set_flags(family: Family) -> list[str]:
    """The flags in which a family differs from plain Llama."""
    return [
        field.name for field in dataclasses.fields(Family)
        if field.name not in NOT_FLAGS and getattr(family, field.name) != field.default
    ]


def flag_cases() -> list[tuple[str, str]]:
    """(checkpoint, flag) for every flag of every family, with a checkpoint in which it is used."""
    special = {("phi3", "longrope"): "phi3-long", ("minicpm3", "longrope"): "minicpm3-long"}
    chosen = []
    for family in FAMILIES:
        for flag in set_flags(family):
            usual = {"qwen3": "qwen3-window"}.get(family.name, family.name)
            chosen.append((special.get((family.name, flag), usual), flag))
    return chosen


def shows(case: Case, config: ModelConfig) -> bool:
    """Whether running this config on the case's checkpoint is caught: refused at loading, or clearly different. One decode
    step is enough: `test_logits_agree` has all."""
    try:
        logits = teacher_forced_logits(load(case.path, torch.float64, config), TOKENS, len(TOKENS) - 1)
    except ModelError:
        return True
    return float((logits - case.oracle64).abs().max()) > CLEARLY * case.tolerance64


@pytest.mark.parametrize(("name", "flag"), flag_cases())
def test_switching_off_a_flag_shows(cases: dict[str, Case], name: str, flag: str) -> None:
    case = cases[name]
    raw = json.loads((case.path / "config.json").read_text())
    family = load_model_config(case.path).family
    if flag == "legacy_act":         # as old files have it; transformers writes the name of today
        raw |= {"hidden_act": family.legacy_act, "hidden_activation": None}
        assert not shows(case, hf_model_config(raw, {}, family))
    default = next(field.default for field in dataclasses.fields(Family) if field.name == flag)
    switched = dataclasses.replace(family, **{flag: 1 if flag == "full_every" else default})
    try:
        config = hf_model_config(raw, {}, switched)
    except ModelError:
        return                       # the checkpoint asks for what the switched family does not have
    assert shows(case, config)


PLAIN_FACTS: dict[str, Any] = {
    "tied": False, "qkv_bias": False, "output_bias": False, "mlp_bias": False, "qk_norm": False, "post_norms": False,
    "norm_offset": 0.0, "embedding_scale": 1.0, "attention_softcap": None, "final_softcap": None, "activation": "silu",
    "late_qk_norm": False, "wide_qk_norm": False, "norm": "rms", "pre_norms": True, "parallel": False, "gated": True,
    "residual_scale": 1.0, "logit_scale": 1.0, "own_mlp_norm": False, "head_bias": False, "learned_positions": False,
    "interleaved": False, "sinks": False, "chunked": False, "temperature": None, "bare_qk_norm": False,
    "first_position": 0, "qkv_clip": None, "inner_norms": False,
}


def fact_changes(config: ModelConfig) -> dict[str, ModelConfig]:
    """Every way to make the model plainer by one fact."""
    changes = {
        fact: dataclasses.replace(config, **{fact: plain})
        for fact, plain in PLAIN_FACTS.items() if getattr(config, fact) != plain
    }
    if any(config.windows):
        changes["windows"] = dataclasses.replace(config, windows=(None,) * config.num_layers)
        shifted = config.windows[1:] + config.windows[:1]
        if shifted != config.windows:
            changes["which layers slide"] = dataclasses.replace(config, windows=shifted)
        wider = tuple(window and window + 1 for window in config.windows)
        changes["window + 1"] = dataclasses.replace(config, windows=wider)
    if config.latent is not None:
        turned = dataclasses.replace(config.latent, interleaved=not config.latent.interleaved)
        changes["which elements rotate together"] = dataclasses.replace(config, latent=turned)
    whole = config.head_dim if config.latent is None else None           # of a latent's keys no other part can rotate
    for fact, plain in {"divisors": (), "long_divisors": (), "scale": 1.0, "dim": whole, "theta": 777.0}.items():
        if not any(rope.turns for rope in config.ropes):
            break
        ropes = tuple(plainer(rope, fact, plain) for rope in config.ropes)
        if ropes != config.ropes:
            changes[f"rope {fact}"] = dataclasses.replace(config, ropes=ropes)
    if len(set(config.ropes)) > 1:
        changes["local rope"] = dataclasses.replace(config, ropes=(config.ropes[-1],) * config.num_layers)
    changes |= {fact: dataclasses.replace(config, experts=changed) for fact, changed in expert_changes(config.experts).items()}
    changes["attention scale"] = dataclasses.replace(config, attention_scale=config.attention_scale * 1.01)
    changes["epsilon"] = dataclasses.replace(config, rms_norm_eps=config.rms_norm_eps * 2)
    return changes


def expert_changes(experts: Experts | None) -> dict[str, Experts]:
    """Every way to choose experts, or to compute them, that is plainer or other by one fact."""
    if experts is None:
        return {}
    routing = experts.routing
    others: dict[str, Any] = {
        "score": "softmax" if routing.score == "sigmoid" else "sigmoid", "normalise": not routing.normalise,
        "scale": routing.scale * 1.01,
    }
    if routing.jitter:
        others = {"jitter": 0.0}
    if routing.choice_bias:
        others["choice_bias"] = False
    if routing.groups > 1:
        others |= {"groups": 1, "top_groups": routing.groups}
        others["group_score"] = "best" if routing.group_score == "best two" else "best two"
    changes = {f"routing {name}": dataclasses.replace(experts, routing=dataclasses.replace(routing, **{name: other}))
               for name, other in others.items()}
    plain_experts = {"shared": 0, "shared_gate": False, "dense": (), "bias": False, "router_bias": False, "limit": None,
                     "scales_input": False}
    for name, plain in plain_experts.items():
        if getattr(experts, name) != plain:
            changes[name] = dataclasses.replace(experts, **{name: plain})
    if experts.used > 1:
        changes["used"] = dataclasses.replace(experts, used=experts.used - 1)
    return changes


def plainer(rope: Rope, fact: str, plain: Any) -> Rope:
    if fact == "dim" and (rope.divisors or plain is None):
        return rope                  # divisors belong to a number of dimensions
    if fact == "divisors" and rope.long_divisors:
        return rope                  # not used here: the context is longer than the original
    return dataclasses.replace(rope, **{fact: plain})


# Together they have every fact; what the others show besides is shown by slow tests.
HUNTED = ("gpt_oss", "glm4_moe", "gemma2", "cohere2", "olmo2", "arcee", "minicpm3", "phi3-long", "qwen2_moe", "llama4",
          "hunyuan_v1_moe", "phimoe", "gpt_neox", "gpt2", "olmo", "opt", "bitnet")


def test_every_fact_is_hunted_on_every_commit(tmp_path: Path) -> None:
    known = [name for name in CHECKPOINTS if is_known(name)]
    facts = {name: set(fact_changes(load_model_config(save_config(name, tmp_path / name)))) for name in known}
    assert set().union(*facts.values()) == set().union(*(facts[name] for name in HUNTED))


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name in HUNTED else pytest.mark.slow) for name in CHECKPOINTS
])
def test_making_any_fact_plainer_shows(cases: dict[str, Case], name: str) -> None:
    config = load_model_config(cases[name].path)
    changes = fact_changes(config)
    assert {"attention scale"} | ({"rope theta"} if not config.learned_positions else set()) <= set(changes)
    assert [fact for fact, changed in changes.items() if not shows(cases[name], changed)] == []


# ---- beside the common path ------------------------------------------------------------------------------------------


def test_short_longrope_is_chosen_by_the_longest_context(cases: dict[str, Case], tmp_path: Path) -> None:
    case = cases["phi3-long"]
    tokens = TOKENS[:ORIGINAL_CONTEXT]
    with torch.no_grad(), AllFloat64():
        expected = build_model("phi3-long", torch.float64)(torch.tensor([tokens]), use_cache=False).logits[0]
    short = load(case.path, torch.float64, max_model_len=ORIGINAL_CONTEXT)
    logits = teacher_forced_logits(short, tokens, 10)
    assert float((logits - expected).abs().max()) <= case.tolerance64
    assert float((logits - case.ours64[:ORIGINAL_CONTEXT]).abs().max()) > CLEARLY * case.tolerance64


@pytest.mark.reliability("P-08")
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "qwen2", "deepseek_v2-lite"])
def test_a_batch_of_unequal_rows_gives_each_row_its_own_logits(cases: dict[str, Case], name: str) -> None:
    model = load(cases[name].path, torch.float64)
    lengths = {0: 1, 1: 23, 2: 9}
    prompts = {row: random_tokens(length + 3, seed=10 + row) for row, length in lengths.items()}
    together = PagedSequences(model)
    batched = {row: [logits] for row, logits in together.step({r: prompts[r][:n] for r, n in lengths.items()}).items()}
    for extra in range(3):           # row 2 stays out of the middle step
        rows = [row for row in lengths if not (row == 2 and extra == 1)]
        step = together.step({row: [prompts[row][lengths[row] + len(batched[row]) - 1]] for row in rows})
        for row, logits in step.items():
            batched[row].append(logits)
    for row, length in lengths.items():
        joined = torch.cat(batched[row])
        alone = teacher_forced_logits(model, prompts[row][: len(joined)], length)
        torch.testing.assert_close(joined, alone, rtol=0, atol=cases[name].tolerance64)


def test_chunked_prefill_gives_the_same_logits(cases: dict[str, Case]) -> None:
    for name in ("gemma3", "phi3", "qwen2", "deepseek_v2", "deepseek_v3"):
        sequences = PagedSequences(load(cases[name].path, torch.float64), block_size=3)
        chunks = [TOKENS[:5], TOKENS[5:6], TOKENS[6:19], TOKENS[19:]]
        logits = torch.cat([sequences.step({0: chunk})[0] for chunk in chunks])
        assert float((logits - cases[name].ours64).abs().max()) <= cases[name].tolerance64


def test_layers_are_grouped_by_window(cases: dict[str, Case]) -> None:
    config = load_model_config(cases["gemma3"].path)
    assert config.windows == (WINDOW,) * 5 + (None, WINDOW)
    groups = kv_groups(config, block_size=4)
    assert [(group.window, group.layers) for group in groups if group.window is None] == [(None, (5,))]
    assert sorted(layer for group in groups for layer in group.layers) == list(range(7))
    assert [groups[group].window for group in layer_groups(config)] == list(config.windows)


def test_logits_are_float32_at_least(cases: dict[str, Case]) -> None:
    model = load(cases["llama"].path, torch.bfloat16)
    logits = teacher_forced_logits(model, TOKENS[:8], 6)
    assert logits.dtype == torch.float32
    # bfloat16 keeps 8 bits: the noise of float32, scaled by the ratio of the epsilons.
    ratio = torch.finfo(torch.bfloat16).eps / torch.finfo(torch.float32).eps
    assert float((logits - cases["llama"].oracle32[:8]).abs().max()) <= cases["llama"].tolerance32 * ratio
