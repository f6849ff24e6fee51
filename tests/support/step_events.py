"""Events of steps for tests: a fixed example, and random ones."""

from hypothesis import strategies as st

from torchtune_adaptive.plan.trace.events import BEFORE_STEP, KINDS, Allocation, Operation, StepEvents

MIB = 2**20
OPERATIONS = tuple(
    Operation(name, phase, module)
    for name, phase, module in [
        ("aten.mm.default", "forward", "layers.0.mlp.w1"),
        ("aten.mm.default", "forward", "layers.1.mlp.w1"),
        ("aten.nll_loss_forward.default", "loss", "loss"),
        ("aten.mm.default", "backward", "layers.1.mlp.w1"),
        ("aten.add_.Tensor", "optimizer", "optimizer"),
    ]
)
# The peak is in the loss, with 2 + 4 + 3 + 3 + 8 MiB.
EVENTS = StepEvents(
    4,
    256,
    OPERATIONS,
    (
        Allocation(2 * MIB, "parameters", "layers.0.mlp.w1", BEFORE_STEP, None),
        Allocation(4 * MIB, "optimizer state", "layers.1.mlp.w1", BEFORE_STEP, None),
        Allocation(3 * MIB, "activations", "layers.0.mlp.w1", 0, None),
        Allocation(3 * MIB, "activations", "layers.1.mlp.w1", 1, 4),
        Allocation(8 * MIB, "activations", "loss", 2, 3),
        Allocation(5 * MIB, "gradients", "layers.1.mlp.w1", 3, 4),
    ),
)


@st.composite
def drawn_events(draw: st.DrawFn) -> StepEvents:
    """Any allocations over up to 30 operations; live bytes differ from one operation to the next."""
    num_operations = draw(st.integers(1, 30))
    phases = sorted(draw(st.lists(st.sampled_from("abc"), min_size=num_operations, max_size=num_operations)))
    found = [Allocation(1, "parameters", "output", BEFORE_STEP, None)]
    for _ in range(draw(st.integers(0, 20))):
        made = draw(st.integers(BEFORE_STEP, num_operations - 1))
        freed = draw(st.none() | st.integers(max(made, 0) + (made >= 0), num_operations))
        kind, module = draw(st.sampled_from(KINDS)), draw(st.sampled_from(["layers.0", "layers.1", "loss"]))
        ends = None if freed == num_operations else freed
        found.append(Allocation(draw(st.integers(1, 6) | st.integers(1, 10**6)), kind, module, made, ends))
    operations = tuple(Operation("mm", phase, "layers.0") for phase in phases)
    return StepEvents(1, 8, operations, tuple(sorted(found, key=lambda one: one.made)))
