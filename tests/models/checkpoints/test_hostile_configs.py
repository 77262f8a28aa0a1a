"""Whatever stands in a field of a stranger's model files: a model, or one line that names the file. Never another error.

The fields are those that the code asks for: a config that notes them is read first, and then each of them holds each value.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_writer import Typed, write_gguf
from quantised_models import DIALECTS
from test_model_config import GGUF, LLAMA
from tiny_configs import BASE, CHECKPOINTS
from torch import Tensor

from ridgeline.choices import draft_checkpoint
from ridgeline.distributed.comm import Communicator
from ridgeline.errors import ModelError
from ridgeline.model_files import MAX_DEPTH, MOST_BYTES
from ridgeline.models import weights
from ridgeline.models.checkpoints import quantisation, small_dialects
from ridgeline.models.checkpoints.canonical import NF4, canonical, matrix_shape
from ridgeline.models.checkpoints.quantised_source import _naming
from ridgeline.models.checkpoints.recipe import MOST_NAMES, Section
from ridgeline.models.config_fields import MAX_LAYERS
from ridgeline.models.decoder import Decoder
from ridgeline.models.model_config import hf_model_config, load_model_config
from ridgeline.models.weights import open_checkpoint

WORDS = "a" * 5_000
HOSTILE: tuple[Any, ...] = (
    True, False, 0, -1, 1, 3, 0.5, 1e-300, 1e300, 2**31, 2**40, 10**30, -(10**30), 10**400, math.nan, math.inf, "", "x", "1",
    WORDS, "\ud800", "a\nb", [], [1], ["x"], [None], [[]], [0, 0, 0], [10**30] * 3, [{"a": 1}], ["full_attention"] * 100, {},
    {"a": 1}, {"rope_type": []},
)
EACH = 2                             # configs in which a field holds all values
MOST_SAID = 700


class Noting(dict[str, Any]):
    """A config that notes the paths of the fields that it is asked for."""

    def __init__(self, raw: dict[str, Any], asked: set[tuple[str, ...]], path: tuple[str, ...] = ()) -> None:
        inner = {name: Noting(each, asked, (*path, name)) if isinstance(each, dict) else each for name, each in raw.items()}
        super().__init__(inner)
        self._asked, self._path = asked, path
        asked.update((*path, name) for name in raw)

    def get(self, name: str, default: Any = None) -> Any:
        self._asked.add((*self._path, name))
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        self._asked.add((*self._path, str(name)))
        return super().__contains__(name)


def paths_of(raw: dict[str, Any]) -> list[tuple[str, ...]]:
    asked: set[tuple[str, ...]] = set()
    hf_model_config(Noting(raw, asked), {})
    return sorted(asked)


def changed(raw: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    name, *rest = path
    return raw | {name: changed(raw.get(name) or {}, tuple(rest), value) if rest else value}


def check(read: Callable[[], object], where: str, what: object) -> None:
    try:
        read()
    except ModelError as error:
        said = str(error)
        assert said.isprintable() and len(said) <= MOST_SAID and where in said, (what, said[:200])
    except Exception as error:
        pytest.fail(f"{what}: {type(error).__name__}: {str(error)[:200]}")


def hostile_configs(configs: dict[str, dict[str, Any]]) -> Iterator[tuple[object, dict[str, Any]]]:
    """Each field with each value, in the first configs that have it."""
    seen: dict[tuple[str, ...], int] = {}
    for name, raw in configs.items():
        for path in paths_of(raw):
            seen[path] = seen.get(path, 0) + 1
            if seen[path] <= EACH:
                yield from (((name, path, number), changed(raw, path, value)) for number, value in enumerate(HOSTILE))


def families() -> dict[str, dict[str, Any]]:
    """Those whose class alone is in their config; the others differ from one of them in names."""
    found = {}
    for name, (kind, differences) in CHECKPOINTS.items():
        raw = BASE | {"architectures": [f"{kind}ForCausalLM"]} | differences
        try:
            hf_model_config(raw, {})
        except ModelError:
            continue
        found[name] = raw
    return found


@pytest.mark.reliability("S-10d")
def test_no_value_in_a_config_ends_in_another_error() -> None:
    configs = families()
    assert len(configs) > 60
    for what, raw in hostile_configs(configs):
        check(lambda raw=raw: hf_model_config(raw, {}), "config.json", what)


@pytest.mark.reliability("S-10d")
def test_no_value_in_a_quantization_config_ends_in_another_error() -> None:
    more = {
        "auto-round-mx": {"quant_method": "auto-round", "data_type": "mx_fp", "bits": 8, "group_size": 32, "act_bits": 8},
        "auto-round-extra": {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True,
                             "extra_config": {"lm_head": {"bits": 16}, "a.b": {"bits": 8, "group_size": 64}}},
        "gptq-dynamic": {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {"-:x": {}, "+:y": {"bits": 8}},
                         "modules_in_block_to_quantize": [["a"]]},
        "modelopt-file": {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}},
        "fbgemm": {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["a"]},
    }
    configs = {name: LLAMA | {"quantization_config": each} for name, each in
               ({name: config for name, (config, _) in DIALECTS.items()} | more).items()}
    for what, raw in hostile_configs(configs):
        check(lambda raw=raw: hf_model_config(raw, {}), "config.json", what)


@pytest.mark.parametrize("group", [0, -7, 10**30, True, 32.5, "32", [32], 2**40])
@pytest.mark.parametrize("dialect", ["awq", "gptq", "ct-w4a16", "ct-nvfp4"])
def test_a_group_is_a_size(dialect: str, group: object) -> None:
    """They passed, and a table of that many groups was made, or a division by them."""
    config, _ = DIALECTS[dialect]
    path = ("quantization_config", *(("config_groups", "group_0", "weights") if dialect.startswith("ct") else ()), "group_size")
    with pytest.raises(ModelError, match="group_size"):
        hf_model_config(changed(LLAMA | {"quantization_config": config}, path, group), {})


@pytest.mark.parametrize("values", [
    [0, 16], [-1, 16], [10**30, 16], [True, 16], [16], [16, 16, 16], "16x16x16", "9999999999x1", "x",
])
def test_a_block_has_two_sizes(values: object) -> None:
    config, _ = DIALECTS["ct-fp8-block"]
    path = ("quantization_config", "config_groups", "group_0", "weights", "block_structure")
    with pytest.raises(ModelError, match="strategy 'block' is not supported"):
        hf_model_config(changed(LLAMA | {"quantization_config": config}, path, values), {})
    if isinstance(values, list):
        fp8 = {"quant_method": "fp8", "weight_block_size": values}
        with pytest.raises(ModelError, match="weight_block_size"):
            hf_model_config(LLAMA | {"quantization_config": fp8}, {})


@pytest.mark.reliability("S-10d")
def test_no_value_in_gguf_metadata_ends_in_another_error(tmp_path: Path) -> None:
    tensors = {"token_embd.weight": np.zeros((16, 64), np.float32)}
    values: tuple[Any, ...] = (
        0, 3, Typed("int32", -1), Typed("uint64", 2**63), 2**31, 0.5, Typed("float64", 1e300), Typed("float32", math.nan),
        True, "", WORDS, ["x"], [0, 0], Typed("uint32", []), [-1] * 100,
    )
    of_rope = ("type", "factor", "original_context_length", "attn_factor", "yarn_log_multiplier")
    names = [*(name.removeprefix("llama.") for name in GGUF if name.startswith("llama.")),
             *(f"rope.scaling.{each}" for each in of_rope),
             "attention.head_count_kv", "attention.key_length", "attention.sliding_window", "attention.sliding_window_pattern",
             "rope.freq_base", "rope.dimension_count", "expert_count", "expert_used_count", "expert_gating_func", "logit_scale",
             "attention.scale", "expert_feed_forward_length", "expert_group_count", "attention.kv_lora_rank", "embedding_scale",
             "nextn_predict_layers", "attn_logit_softcapping", "attention.temperature_scale"]
    more = {"expert_count": 4, "expert_used_count": 2, "attention.sliding_window": 8, "attention.kv_lora_rank": 8}
    for architecture in ("llama", "gemma3", "deepseek2", "gpt-oss"):
        base = {name.replace("llama.", f"{architecture}."): value for name, value in GGUF.items()}
        base |= {"general.architecture": architecture} | {f"{architecture}.{name}": value for name, value in more.items()}
        for name in names:
            for number, value in enumerate(values):
                file = write_gguf(tmp_path / "m.gguf", base | {f"{architecture}.{name}": value}, tensors)
                check(lambda file=file: load_model_config(file), "m.gguf", (architecture, name, number))


@pytest.mark.parametrize("content", [
    '{"a":' * (MAX_DEPTH + 1) + "1" + "}" * (MAX_DEPTH + 1), "[" * 100_000, '{"a":' + "[" * 900 + "]" * 900 + "}",
    '{"a":' * 50_000, '{"hidden_size":' + "9" * 10_000 + "}", '{"hidden_size": NaN}', '{"vocab_size": 1e999}', '"' + WORDS + '"',
    "", "\x00", "[]", "{",
], ids=range(12))
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_what_no_parser_takes_is_told_in_one_line(content: str, file: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / file).write_text(content)
    check(lambda: load_model_config(tmp_path), file, content[:40])
    if file == "config.json":
        with pytest.raises(ModelError):
            load_model_config(tmp_path)


def test_a_nested_value_leaves_stack_for_its_message(tmp_path: Path) -> None:
    """What prints or compares a value needs as much stack as its parser did, and is called from further down."""
    nested = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    (tmp_path / "config.json").write_text(json.dumps(LLAMA)[:-1] + f', "use_cache": {nested}}}')
    with pytest.raises(ModelError, match=rf"config\.json is nested more than {MAX_DEPTH} deep$"):
        load_model_config(tmp_path)


def test_layers_are_counted_before_they_are_made() -> None:
    with pytest.raises(ModelError, match=f"num_hidden_layers must be at most {MAX_LAYERS}, got"):
        hf_model_config(LLAMA | {"num_hidden_layers": 4096}, {})


@pytest.mark.reliability("S-10")
@pytest.mark.parametrize(("each", "words"), [(b'"a":{},', "600,000 tensors"), (b"[],[],[],[],[],[],[],", "numbers in its head")])
def test_tensors_are_counted_before_they_are_decoded(each: bytes, words: str, tmp_path: Path) -> None:
    """A header of 100 MB took minutes of a start, or 2 GB."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    header = b"{" + each * 600_000
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header) - 1) + header[:-1])
    with pytest.raises(ModelError, match=rf"model\.safetensors: .*{words}"):
        load_model_config(tmp_path)


def test_weight_files_are_counted_before_they_are_opened(tmp_path: Path) -> None:
    """A process may map 65,530."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for number in range(quantisation.MAX_WEIGHT_FILES + 1):
        (tmp_path / f"{number}.safetensors").symlink_to("nowhere")
    with pytest.raises(ModelError, match="10,001 weight files"):
        load_model_config(tmp_path)


@pytest.mark.parametrize("files", [1, 20_000])
def test_an_index_is_counted_before_its_files_are_looked_for(files: int, tmp_path: Path) -> None:
    listed = {f"t{number}": f"f{number % files}" for number in range(20_000 if files > 1 else quantisation.MAX_TENSORS + 1)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    with pytest.raises(ModelError, match=f"index.json has {len(listed):,} tensors in {files:,} files"):
        open_checkpoint(tmp_path)


def test_modules_that_are_left_out_are_counted() -> None:
    """A million of them took a start minutes."""
    many = {"quant_method": "awq", "bits": 4, "group_size": 16, "modules_to_not_convert": ["m"] * (MOST_NAMES + 1)}
    with pytest.raises(ModelError, match="at most 131,072 names, and lists 131,073"):
        hf_model_config(LLAMA | {"quantization_config": many}, {})


def large_header(folder: Path, count: int) -> Path:
    """A checkpoint of so many tensors that no model has."""
    (folder / "config.json").write_text(json.dumps(LLAMA))
    header = {f"t.{number}.weight": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for number in range(count)}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    return folder


def test_of_many_unknown_tensors_a_few_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The 524,000 that a file may have took 20 s of a start: half of them to find out that the model has none of them."""
    monkeypatch.setattr(weights, "MOST_UNKNOWN", 50)
    looked, pieces_of = list[str](), weights.Renamer.pieces_of

    def counted(self: weights.Renamer, name: str) -> list[str] | None:
        looked.append(name)
        return pieces_of(self, name)

    monkeypatch.setattr(weights.Renamer, "pieces_of", counted)
    with pytest.raises(ModelError, match=r"tensors that the model of config\.json does not know: t\.0\.weight.* and 46 more"):
        config = load_model_config(large_header(tmp_path, 99))
        weights.load_weights(Decoder(config, Communicator(), torch.float32, "cpu", 32), tmp_path, config)
    assert len(looked) == 50


def test_a_tensor_that_is_in_a_file_twice_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    text = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}'
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(12))
    with pytest.raises(ModelError, match=r"model\.safetensors"), open_checkpoint(tmp_path) as source:
        source.tensors["a"] = replace(source.tensors["a"], shape=(3,))
        source.read("a", None)


STATE: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "shape": [64, 64], "nested_blocksize": 16, "nested_offset": 0.5}
IN_NF4 = small_dialects.read_bitsandbytes(Section({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "q"))
NF4_RECIPE = next(recipe for _, recipe in IN_NF4.rules if recipe is not None)


def expanded_nf4(state: bytes) -> Tensor:
    tensors = {
        "codes": torch.zeros(2048, 1, dtype=torch.uint8), "table": torch.tensor(NF4), "scale": torch.zeros(64, dtype=torch.uint8),
        "state": torch.frombuffer(bytearray(state), dtype=torch.uint8), "outer": torch.ones(4), "outer_table": torch.ones(256),
    }
    with _naming("a file", "a.module"):
        matrix_shape(NF4_RECIPE, {role: tuple(each.shape) for role, each in tensors.items()}, lambda role: tensors[role])
        return canonical(NF4_RECIPE, tensors)["scale"]


@pytest.mark.parametrize("name", STATE)
def test_whatever_a_state_of_bitsandbytes_says_is_a_matrix_or_one_line(name: str) -> None:
    """Blocks of 10^9 took 16 GB, an infinite size was a traceback, and a long word was written out."""
    for value in HOSTILE:
        with suppress(ModelError):
            try:
                expanded_nf4(json.dumps(STATE | {name: value}).encode())
            except ModelError as error:
                assert len(str(error)) <= MOST_SAID, (name, value)
                raise


def test_a_state_of_bitsandbytes_is_bounded() -> None:
    whole = expanded_nf4(json.dumps(STATE).encode())
    assert expanded_nf4(json.dumps(STATE | {"nested_blocksize": 2**62}).encode()).shape == whole.shape
    with pytest.raises(ModelError, match="quant_state of bitsandbytes cannot be read"):
        expanded_nf4(json.dumps(STATE).encode() + b" " * 2**16)


@pytest.mark.parametrize("content", [b"[" * 100, b"[1]", b"{", b'{"a":' * 100 + b"1" + b"}" * 100, b" " * (MOST_BYTES + 1)])
def test_a_quantisation_file_beside_the_config_is_bounded_as_the_config_is(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "hf_quant_config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"hf_quant_config\.json"):
        load_model_config(tmp_path)


@pytest.mark.parametrize("content", [
    "[]", '{"model": 1}', '{"model": {"vocab": [1]}}', '{"model": {"vocab": [[]]}}', '{"model": {"vocab": {"a": "b"}}}', "{",
    '{"model": {"vocab": {"a": 1e999}}}', '{"added_tokens": [{}]}', '{"added_tokens": 1}', '{"model": {"vocab": 1}}',
])
def test_the_tokens_of_a_draft_model_are_read_or_refused_in_one_line(content: str, tmp_path: Path) -> None:
    """A traceback: no tokenizer is made of this file."""
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        draft_checkpoint._tokens(tmp_path)
