"""A config's step over fake tensors: extrapolated from few layers where they repeat, and of the right kinds."""

import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torchtune
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torchtune import config

from tests.support.ranks import run_alone
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.plan.changes import lora_version
from torchtune_adaptive.plan.host_memory import HostFigures
from torchtune_adaptive.plan.replay import StepMemory, exact
from torchtune_adaptive.plan.trace import config_steps
from torchtune_adaptive.plan.trace.config_steps import steps_of, trace_config
from torchtune_adaptive.plan.trace.events import BEFORE, WEIGHTS, Event, Events
from torchtune_adaptive.plan.trace.fake_recipe import FakeRecipe
from torchtune_adaptive.plan.trace.few_layers import layers_limited_to
from torchtune_adaptive.plan.trace.host_figures import host_figures
from torchtune_adaptive.plan.trace.loading import load
from torchtune_adaptive.plan.trace.optimizer_stand_ins import stand_in_for_optimizer
from torchtune_adaptive.plan.trace.recorder import StepTrace
from torchtune_adaptive.plan.trace.restored import fake_process_group
from torchtune_adaptive.plan.trace.step_events import StepEvents
from torchtune_adaptive.stock.configs import load_config

SEQ_LEN = 64
SHALLOW, LAYERS = "model.num_layers=1", "model.num_layers=3"  # as few layers as a test needs
CUDA = ("device=cuda", "dtype=bf16", SHALLOW)


def _cfg(kind: str, *overrides: str) -> DictConfig:
    return load_config(f"tiny/{kind}", overrides)


def _model(component: str, **arguments: int) -> list[str]:
    """Overrides that replace the config's model by one of ``tests.support.fake_models``."""
    removed = ["vocab_size", "num_layers", "num_heads", "num_kv_heads", "embed_dim", "intermediate_dim", "max_seq_len"]
    return [
        *(f"~model.{name}" for name in removed if name not in arguments),
        f"model._component_=tests.support.fake_models.{component}",
        *(f"model.{name}={value}" for name, value in arguments.items()),
    ]


REFUSED = {
    "`model` must be a TransformerDecoder": _model("of_images"),
    "`optimizer` of bitsandbytes must be one of Adam, ": ["optimizer=bitsandbytes.optim.Unknown8bit"],
    "A train step of the config cannot be traced: raised TypeError: LBFGS.step() missing 1": [
        "~optimizer.fused",
        "optimizer=torch.optim.LBFGS",
    ],
    "Rows have ": ["model.max_seq_len=32"],
    "`num_layers` must be an integer, but is 'two' instead.": ["model.num_layers=two"],
}


def _memory(cfg: DictConfig, *, world_size: int = 1, seq_len: int = SEQ_LEN, rows: int = 2) -> StepMemory:
    with steps_of(cfg, world_size=world_size) as steps:
        return exact(steps.events(steps.num_layers, rows, seq_len))


# By what the config says of 10 layers: overrides, and the layers of the models that are traced.
TRACED_LAYERS: dict[str, tuple[list[str], tuple[int, ...]]] = {
    "alike": (["model.num_layers=10"], (4, 6)),
    "of another builder": (_model("of_another_builder", depth=10), (10,)),
    "every ninth checkpointed": (["model.num_layers=10", "ac_mode=selective", "ac_option=9"], (10,)),
}
LOADED = {
    "as they are": [],
    "in 4 bits": [
        "model.quantize_base=True",
        "model.embed_dim=128",
        "model.intermediate_dim=128",
        "model.num_kv_heads=4",
    ],
}


def _kinds() -> dict[str, Any]:
    seen: dict[str, Any] = {}
    with steps_of(_cfg("full", *CUDA, "fsdp_cpu_offload=True"), world_size=4) as steps:
        step = exact(steps.events(1, 2, SEQ_LEN))
        seen["on the host"] = HostFigures.from_flat(steps.grown((1,), FakeRecipe.host_figures))
    seen["offloaded"] = {phase: step.kinds(phase) for phase in ("backward", "optimizer")}
    plain = ["~clip_grad_norm", *CUDA, LAYERS]
    seen["at once"] = _memory(_cfg("full", *plain), seq_len=8).phases["backward"]
    seen["in backward"] = _memory(_cfg("full", *plain, "optimizer_in_bwd=True"), seq_len=8).phases["backward"]
    paged = _cfg("full", *CUDA, "~optimizer.fused", "optimizer=bitsandbytes.optim.PagedAdamW8bit")
    with steps_of(paged, world_size=1) as steps:
        held_bytes = exact(steps.events(1, 2, SEQ_LEN)).kinds("clip")["optimizer state"]
        figures = steps.grown((1,), FakeRecipe.figures)
    seen["paged"] = figures["paged_bytes"], held_bytes, figures["num_parameters"]
    offloading = ["model.num_layers=2", "enable_activation_checkpointing=True", "enable_activation_offloading=True"]
    with steps_of(_cfg("full", *CUDA, *offloading), world_size=1) as steps:
        steps.events(2, 2, SEQ_LEN)
        seen["activations on the host"] = HostFigures.from_flat(steps.grown((2,), FakeRecipe.host_figures)).activations
    plain = [*CUDA, "~optimizer.fused"]
    steps = [_memory(_cfg("full", *plain, *more)).phases for more in ([], ["optimizer.foreach=False"])]
    seen["lists of tensors"] = [step["optimizer"] for step in steps]
    seen["buffers"] = [
        _memory(_cfg("full", *_model("with_a_buffer", num_layers=1, is_lazy=is_lazy))).phases for is_lazy in (0, 1)
    ]
    full = _cfg("full", *CUDA)
    del full["lr_scheduler"]  # which LoRA recipes need
    lora = lora_version(full)
    assert lora is not None
    seen["LoRA"] = [_memory(cfg).phases["optimizer"] for cfg in (full, lora)]
    seen["loads"] = {
        name: trace_config(_cfg("lora", *CUDA, *more), world_size=1, seq_lens=[8]).lengths[0]
        for name, more in LOADED.items()
    }
    for name, (overrides, _) in TRACED_LAYERS.items():
        with steps_of(_cfg("full", *overrides), world_size=2) as steps:
            seen[name] = steps.layers_to_trace(SEQ_LEN)
    with fake_process_group(4):
        seen["state of ranks"] = {name: _host_figures_on_ranks(4, name) for name in STATE_OF_RANKS}
    return seen | {sentence: _refusal(*overrides) for sentence, overrides in REFUSED.items()}


# For a parameter of 512 x 256 elements in float32 on 4 ranks: the bytes of a rank's state, with a scale for each 256
# elements (and torchao's tables of 256 entries), and its bytes on the host.
STATE_OF_RANKS = {
    "torch.optim.AdamW": (2 * 4 * 32768 + 4, 0),
    "torchao.optim.AdamW8bit": (2 * (32768 + 4 * 128 + 4 * 256), 0),
    "bitsandbytes.optim.PagedAdamW8bit": (2 * (32768 + 4 * 128), 2 * 32768),
}


def _host_figures_on_ranks(world_size: int, name: str) -> tuple[int, int, int]:
    """For one sharded parameter: bytes of a rank's state, of all ranks' state, and of a rank on the host."""
    mesh = init_device_mesh("cpu", (world_size,))
    model = nn.Linear(256, 512, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    model.weight.grad = torch.zeros_like(model.weight)
    optimizer_cfg = OmegaConf.create({"_component_": name, "lr": 0.1})
    optimizer = config.instantiate(OmegaConf.create(stand_in_for_optimizer(optimizer_cfg)), [model.weight])
    optimizer.step()
    found = host_figures(OmegaConf.create({}), [model], [optimizer], activation_bytes_per_token=[])
    return found["state"], found["whole_state"], found["offloaded"]


def _refusal(*overrides: str) -> str:
    with pytest.raises(InputError) as refused:
        _memory(_cfg("full", *overrides))
    return str(refused.value)


@pytest.fixture(scope="module")
def kinds() -> dict[str, Any]:
    return run_alone(_kinds)


@pytest.mark.parametrize("name", TRACED_LAYERS)
def test_few_layers_are_traced_only_where_layers_repeat_and_can_be_left_out(kinds: dict[str, Any], name: str) -> None:
    assert kinds[name] == TRACED_LAYERS[name][1]


def test_offloaded_bytes_are_those_of_a_rank_on_the_host_and_not_on_the_device(kinds: dict[str, Any]) -> None:
    backward, optimizer = kinds["offloaded"]["backward"], kinds["offloaded"]["optimizer"]
    assert not any("optimizer state" in kinds for kinds in (backward, optimizer))
    assert optimizer.get("gradients", 0) == optimizer.get("temporaries", 0) == 0  # the step runs on the host
    assert backward["gathered parameters"] > 0
    host = kinds["on the host"]
    of_rank = host.weights / 4
    assert of_rank <= host.offloaded_weights <= 2 * of_rank  # pinned
    assert host.state == pytest.approx(2 * of_rank, rel=0.01)
    assert host.offloaded == 2 * host.offloaded_weights + host.state
    assert host.whole_state == pytest.approx(2 * host.weights, rel=0.01)


def test_the_inputs_of_all_layers_are_offloaded_and_what_the_last_norm_saves(kinds: dict[str, Any]) -> None:
    in_bf16, in_fp32, in_int64 = str(2 * 128), str(4 * 128), str(8)
    assert kinds["activations on the host"] == {in_bf16: 2, in_fp32: 3, in_int64: 1}  # the last are tokens


def test_an_optimizer_in_backward_never_has_all_gradients_at_once(kinds: dict[str, Any]) -> None:
    assert kinds["in backward"] < kinds["at once"]


def test_paged_state_is_counted_apart_from_state_on_the_device(kinds: dict[str, Any]) -> None:
    paged_bytes, held_bytes, num_parameters = kinds["paged"]
    assert 0 < held_bytes < paged_bytes < 2 * num_parameters


def test_an_optimizer_steps_over_lists_of_tensors_as_on_cuda(kinds: dict[str, Any]) -> None:
    by_default, over_tensors = kinds["lists of tensors"]
    assert by_default > over_tensors


def test_a_model_that_makes_a_buffer_in_its_first_step_is_planned_as_one_that_has_it(kinds: dict[str, Any]) -> None:
    at_once, lazily = kinds["buffers"]
    assert lazily == at_once


def test_the_lora_version_of_a_config_for_full_finetuning_is_planned_and_takes_less(kinds: dict[str, Any]) -> None:
    full, lora = kinds["LoRA"]
    assert lora < full


@pytest.mark.parametrize("name", LOADED)
def test_all_that_is_large_before_the_state_is_loaded(kinds: dict[str, Any], name: str) -> None:
    step: StepEvents = kinds["loads"][name]
    (loads,) = step.loads
    kept: list[int] = []
    for one in loads:
        given_back = {event.taken for event in one}
        kept += [event.num_bytes for place, event in enumerate(one) if event.taken < 0 and place not in given_back]
    weights = [one.num_bytes for one in step.traced[1][0] if one.phase == BEFORE and one.kind in WEIGHTS]
    kept_large, large = (sorted(num_bytes for num_bytes in some if num_bytes >= 1024) for some in (kept, weights))
    assert kept_large == large
    angles = 4 * 512 * 16  # of 512 positions
    assert loads[0] == load([2 * angles], temporary=[angles] * 3)


@pytest.mark.parametrize("name", STATE_OF_RANKS)
def test_each_rank_has_its_share_of_the_state_and_all_ranks_have_the_whole(kinds: dict[str, Any], name: str) -> None:
    state, whole_state, on_host = kinds["state of ranks"][name]
    assert (state, on_host) == STATE_OF_RANKS[name]
    assert whole_state == pytest.approx(4 * state, rel=1e-4)  # torch's count of steps is not a part of the parameter


@pytest.mark.parametrize("sentence", REFUSED)
def test_a_config_that_cannot_be_planned_is_refused_with_the_reason(kinds: dict[str, Any], sentence: str) -> None:
    assert kinds[sentence].startswith(sentence)


def test_without_torchvision_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):  # torchtune's parts for images are imported anew
        if name.startswith(("torchvision", "torchtune.models", "torchtune.modules.transforms")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(torchtune, "models", raising=False)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(InputError, match=r"vision_11b' cannot be imported: ModuleNotFoundError: .*torchvision"):
        layers_limited_to(1, "torchtune.models.llama3_2_vision.llama3_2_vision_11b").__enter__()


# ---- with a fake recipe


class RepeatingRecipe:
    """Replaces ``FakeRecipe``: a model of 10 equal layers, each of which keeps ``batch_size * seq_len`` bytes.

    The config gives the ``operation`` of the layers, the bytes that are taken last by the model's number of layers
    (``last_bytes``), and how many bytes each pass of a loop over the rows keeps (``pass_bytes``).
    """

    fusion_interval = 0
    loads: Sequence[Events] = ()

    def __init__(self, cfg: DictConfig, *, num_layers: int | None = None) -> None:
        self.models: list[Any] = []
        self.true_num_layers = 10
        self.num_layers = num_layers or self.true_num_layers
        self._operation = cfg.get("operation", "mm")
        self._last_bytes = cfg.get("last_bytes", {}).get(self.num_layers, 0)
        self._pass_bytes = cfg.get("pass_bytes", [])
        self._rows, self._seq_len = 0, 0

    def trace(self, batch_size: int, seq_len: int) -> "RepeatingRecipe":
        self._rows, self._seq_len = batch_size, seq_len
        return self

    def events(self) -> Events:
        taken = [(self._operation.format(seq_len=self._seq_len), self._rows * self._seq_len)] * self.num_layers
        if self._pass_bytes:  # of the first and the last pass, and of those between
            first, between, last = self._pass_bytes
            taken += [("row", [first, *[between] * (self._rows - 2), last][one]) for one in range(self._rows)]
        taken.append(("last", self._last_bytes))
        return tuple(Event("forward", name, "activations", num_bytes) for name, num_bytes in taken)

    def figures(self) -> dict[str, int]:
        return {"num_parameters": 7 + 100 * self.num_layers, "paged_bytes": 0}

    def host_figures(self) -> dict[str, int]:
        return {"weights": 7 + 100 * self.num_layers, "64": self.num_layers}


@pytest.fixture
def repeating(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_steps, "FakeRecipe", RepeatingRecipe)


@pytest.mark.usefixtures("repeating")
@pytest.mark.parametrize("operation", ["mm", "mm {seq_len}"], ids=["same operations", "other operations"])
def test_events_and_figures_of_each_length_are_those_of_the_whole_model(operation: str) -> None:
    cfg = OmegaConf.create({"device": "cpu", "operation": operation})
    step = trace_config(cfg, world_size=1, seq_lens=[80, 32, 128])
    assert (step.traced_layers, step.num_layers, step.num_parameters) == ((4, 6), 10, 1007)
    assert step.host == HostFigures(weights=1007, activations={"64": 10})
    for one, seq_len in zip(step.lengths, (80, 32, 128), strict=True):
        assert one.seq_len == seq_len
        for rows in (1, 2, 7):
            assert one.at(rows) == RepeatingRecipe(cfg).trace(rows, seq_len).events()


@pytest.mark.usefixtures("repeating")
@pytest.mark.parametrize("pass_bytes", [[1000, 1000, 1000], [700, 1000, 300]])
def test_a_loop_over_the_rows_has_as_many_passes_as_rows(pass_bytes: list[int]) -> None:
    cfg = OmegaConf.create({"device": "cpu", "pass_bytes": pass_bytes})
    (step,) = trace_config(cfg, world_size=1, seq_lens=[32]).lengths
    for rows in (2, 3, 4, 9):
        assert step.at(rows) == RepeatingRecipe(cfg).trace(rows, 32).events()


class ErraticRecipe(RepeatingRecipe):
    """One that runs another operation with each number of rows."""

    def events(self) -> Events:
        return (Event("forward", f"mm {self._rows}", "activations", 8),)


def test_steps_whose_operations_depend_on_the_rows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_steps, "FakeRecipe", ErraticRecipe)
    with pytest.raises(InputError, match=r"does not follow from that with 3 and 4 rows of 32 tokens\.$"):
        trace_config(OmegaConf.create({"device": "cpu"}), world_size=1, seq_lens=[32])


@pytest.mark.usefixtures("repeating")
@pytest.mark.parametrize(
    ("last_bytes", "layers"),
    [({4: 3000, 6: 5000, 8: 7000}, (4, 6)), ({4: 5500, 6: 6500, 8: 8100}, (10,))],
    ids=["linear", "the third model takes more"],
)
def test_few_layers_are_traced_only_if_a_third_model_confirms_the_extrapolation(
    last_bytes: dict[int, int], layers: tuple[int, ...]
) -> None:
    cfg = OmegaConf.create({"device": "cpu", "last_bytes": last_bytes})
    with steps_of(cfg, world_size=1) as steps:
        assert steps.layers_to_trace(500) == layers


# ---- live bytes by kind


def _traced_kinds(trace: StepTrace, *phases: str) -> dict[str, dict[str, int]]:
    """In each phase, makes two tensors of 40 bytes and frees both. Returns the bytes of each kind at its peak."""
    with trace:
        for phase in phases:
            trace.enter_phase(phase)
            first = torch.empty(10)
            second = first + 1
            del first, second
    memory = exact(trace.events())
    return {phase: memory.kinds(phase) for phase in phases}


@pytest.mark.parametrize("phase", ["clip", "optimizer"])
def test_bytes_made_after_backward_are_temporaries_on_the_device_or_on_the_host(phase: str) -> None:
    found = _traced_kinds(StepTrace(), "backward", phase)
    assert (found["backward"]["activations"], found[phase]) == (80, {"activations": 0, "temporaries": 80})
    on_host = _traced_kinds(StepTrace(steps_on_host=True), "backward", phase)
    assert sum(on_host[phase].values()) == 0
