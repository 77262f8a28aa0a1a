"""When old garbage is looked for: in a process of its own, whose collector it is."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

from tiny_models import save_checkpoint

from ridgeline.engine.core.gc_policy import only_the_young

SCRIPT = """
import gc, weakref
from ridgeline.engine.core import gc_policy

class Thing:
    pass

def cycle():
    thing = Thing()
    thing.itself = thing
    return weakref.ref(thing), thing

gc_policy.freeze_loaded()
assert gc.get_freeze_count() > 1000 and gc.get_threshold()[2] == 2000
found, thing = cycle()
gc.collect(1)                        # it is old now
gc.collect(1)
del thing
gc_policy.collect_old()
assert found() is not None, "not after so little work"
for _ in range(10):
    gc.collect(1)
assert found() is not None, "the young are not all"
gc_policy.collect_old()
assert found() is None
print("right")
"""

ANSWERS = """
import gc, sys
from ridgeline.engine.llm import LLM
from ridgeline.sampling_params import SamplingParams

llm = LLM(sys.argv[1], device="cpu", dtype="float32", max_model_len=128, max_num_seqs=4, skip_tokenizer_init=True)
gc.collect()
gc.freeze()
gc.collect()                         # from here on few objects are old, so that few new ones make a full collection due
gc.set_threshold(20, 1, 1)
full = []
gc.callbacks.append(lambda phase, facts: full.append(facts["generation"] == 2) if phase == "start" else None)
def young():
    return [[] for _ in range(1000)]
young()
assert sum(full), "one is due at once outside of a call"
prompts = [{"prompt_token_ids": [5 + number, 6, 7]} for number in range(8)]
params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
full.clear()
llm.generate(prompts, params, use_tqdm=False)
assert full, "the young are collected"
assert not sum(full), "no full collection before the last token"
assert gc.get_threshold() == (20, 1, 1), "the caller's thresholds are back"
young()
assert sum(full), "one that is due runs behind the call"
llm.close()
print("right")
"""


def test_no_full_collection_runs_while_requests_are_answered(tmp_path: Path) -> None:
    """By count: the heap of a caller's process holds 200,000 objects of imported modules, and a scan of them takes 0.1 s."""
    model = save_checkpoint("qwen3", tmp_path, max_position_embeddings=128)
    ran = subprocess.run([sys.executable, "-c", ANSWERS, str(model)], capture_output=True, text=True, timeout=300)
    assert ran.stdout == "right\n", ran.stderr


def test_the_old_are_looked_at_in_quiet_moments() -> None:
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60)
    assert ran.stdout == "right\n", ran.stderr


def test_calls_in_several_threads_leave_the_thresholds_as_they_were() -> None:
    """Whichever call ends first: two models in one process answer at once."""
    own, before = gc.get_threshold(), (700, 10, 10)
    gc.set_threshold(*before)                            # an engine that ran in this process has left its own
    first, second = only_the_young(), only_the_young()
    first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    during = gc.get_threshold()
    second.__exit__(None, None, None)
    after = gc.get_threshold()
    gc.set_threshold(*own)
    assert during[2] > before[2] and after == before
