"""A model is captured by running it: what differs between steps must not decide what it does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fusewright.compiler.capture.dispatch import trace_by_dispatch
from fusewright.compiler.capture.trace import Traced, TraceError, check_sizes


class Model(nn.Module):
    def __init__(self, forward: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4), requires_grad=False)
        self.code = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self, x)  # type: ignore[operator,no-any-return]


def capture(forward: object) -> Traced:
    x = torch.empty(5, 4)
    named, dynamic = {"x": x}, {"x": {0: "num_tokens"}}
    return trace_by_dispatch(Model(forward), (x,), named, dynamic, str)


def test_a_graph_has_sizes_weights_and_steps_as_inputs_and_dynamos_spelling() -> None:
    traced = capture(lambda model, x: (x * model.weight).view(-1, 2).to(torch.float64))
    assert [(source.name, source.dim) for source in traced.inputs] == [
        ("x", 0),
        ("weights/weight", None),
        ("x", None),
    ]
    calls = [node.target for node in traced.gm.graph.nodes if node.op.startswith("call")]
    assert [getattr(target, "__name__", target) for target in calls] == ["mul", "view", "to"]
    x = torch.rand(3, 4)
    (made,) = [traced.gm(3, torch.full((4,), 2.0), x)]
    assert torch.equal(made[0] if isinstance(made, tuple) else made, (2 * x).view(-1, 2).double())


def read_behind(model: Model, x: Tensor) -> Tensor:
    y = x + 1
    view = y[:, :2]
    y.mul_(model.weight)
    return y.sum(-1, keepdim=True) + view


def of_an_input(model: Model, x: Tensor) -> Tensor:
    return x.mul_(model.weight)


def of_another_dtype(model: Model, x: Tensor) -> Tensor:
    return (x + 1).half().mul_(model.weight)


def of_its_own(model: Model, x: Tensor) -> Tensor:
    return (x + 1).view(-1, 2).add_(1).view(-1, 4).mul_(model.weight)


@pytest.mark.parametrize(
    ("forward", "in_place"),
    [(read_behind, 1), (of_an_input, 1), (of_another_dtype, 1), (of_its_own, 0)],
)
def test_an_op_in_place_makes_a_tensor_of_its_own_where_nobody_can_tell(
    forward: Callable[[Model, Tensor], Tensor], in_place: int
) -> None:
    traced = capture(forward)
    calls = [str(node.target) for node in traced.gm.graph.nodes if node.op.startswith("call")]
    assert sum("_.Tensor" in call for call in calls) == in_place
    model, x = Model(forward), torch.rand(3, 4)
    model.weight.copy_(torch.rand(4))
    expected = model(x.clone())
    (made,) = [traced.gm(3, model.weight, x)]
    assert torch.equal(made[0] if isinstance(made, tuple) else made, expected)


def test_a_size_that_became_a_number_behind_the_capture_is_refused() -> None:
    traced = capture(lambda model, x: x * model.weight)
    check_sizes(traced)
    int(traced.gm.graph.find_nodes(op="placeholder")[0].meta["example_value"])
    with pytest.raises(TraceError, match="made num_tokens static: 5"):
        check_sizes(traced)


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda model, x: x if x.sum() > 0 else -x, "cannot be captured"),
        (lambda model, x: x if x.shape[0] > 3 else -x, "another path unless num_tokens satisfies"),
        (lambda model, x: x.view(5, 4), "num_tokens static|another path"),
        (lambda model, x: x + torch.tensor([1.0, 2.0, 3.0, 4.0]), "a tensor of numbers"),
    ],
)
def test_code_that_depends_on_data_or_on_the_number_of_tokens_is_refused(
    forward: object, message: str
) -> None:
    with pytest.raises(TraceError, match=message):
        capture(forward)
