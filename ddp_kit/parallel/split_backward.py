"""A backward pass in two parts, for zero-bubble schedules (arXiv 2401.10241): first the gradient of what a stage has
received, for which the stage before waits, then the gradients of its weights.

torch.distributed.pipelining has this in private functions, which differ between versions and fail where layers of a
stage share weights ("backward through the graph a second time", torch 2.10 and 2.13). Here are only public functions.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

Gradients = tuple[Tensor | None, ...]


@dataclass(eq=False)
class _Group:
    """Nodes between output and input from which the same leaves get gradients, and these leaves."""

    nodes: list[Node] = field(default_factory=list)
    leaves: dict[Tensor, None] = field(default_factory=dict)


def backward_to_input(output: Tensor, gradient: Tensor | None, received: Tensor | None) -> Callable[[], None]:
    """Set `received.grad`; the function that is returned adds the gradients of all other leaves to theirs.

    `gradient`: of `output`; None: it is a scalar loss. `received`: None, or one that requires no gradient, on a stage
    before which nothing is trained: then all is left to the second part.
    Each weight's gradient is computed once. Where weights are shared by several layers of a stage, what is between
    these is computed twice.
    """
    if output.grad_fn is None:  # it is what was received
        torch.autograd.backward(output, gradient)
        return lambda: None
    path = {} if received is None or not received.requires_grad else _path(output.grad_fn, received)
    if received is None or not path:
        return partial(torch.autograd.backward, output, gradient)
    groups = _groups(path)
    reached: dict[Node, Gradients] = {}
    hooks = [node.register_prehook(partial(_note, reached, node)) for group in groups for node in group.nodes]
    try:
        (received.grad,) = torch.autograd.grad(output, received, gradient, retain_graph=True)
    finally:
        for hook in hooks:
            hook.remove()
    return partial(_backward_to_leaves, groups, reached)


def _note(reached: dict[Node, Gradients], node: Node, gradients: Gradients) -> None:
    # Copies: the gradient of a broadcast weight can be a view of these. The next pass adds to it in place, while the
    # stage before may still wait for the same memory.
    reached[node] = tuple(None if each is None else each.clone() for each in gradients)


def _backward_to_leaves(groups: list[_Group], reached: dict[Node, Gradients]) -> None:
    for group in groups:
        edges, gradients = list[GradientEdge](), list[Tensor]()
        for node in group.nodes:
            for number, gradient in enumerate(reached.get(node, ())):
                if gradient is not None:
                    edges.append(GradientEdge(node, number))
                    gradients.append(gradient)
        # A node may get gradients from another one of its group, which are part of what has reached it already.
        hooks = [
            node.register_prehook(lambda _gradients, whole=reached[node]: whole)
            for node in group.nodes
            if node in reached
        ]
        try:
            if edges:
                # Kept, for another group may need what is between these nodes.
                torch.autograd.backward(edges, gradients, retain_graph=True, inputs=[*group.leaves])
        finally:
            for hook in hooks:
                hook.remove()
    groups.clear()  # which frees the graph
    reached.clear()


def _path(root: Node, received: Tensor) -> dict[Node, None]:
    """The nodes from which a backward pass reaches `received`, in the same order in every run: gradients are added in
    this order."""
    before: dict[Node, list[Node]] = {root: []}
    ahead, path = [root], dict[Node, None]()
    back = list[Node]()
    while ahead:
        node = ahead.pop()
        if getattr(node, "variable", None) is received:
            back.append(node)
        for following, _ in node.next_functions:
            if following is not None:
                if following not in before:
                    before[following] = []
                    ahead.append(following)
                before[following].append(node)
    while back:
        node = back.pop()
        if node not in path:
            path[node] = None
            back += before[node]
    return path


def _groups(path: dict[Node, None]) -> list[_Group]:
    """What is to be computed in the second part; nodes that share a leaf are in one group."""
    of_leaf: dict[Tensor, _Group] = {}
    for node in path:
        group = _Group([node], _leaves_beside(node, path))
        for other in dict.fromkeys(of_leaf[leaf] for leaf in group.leaves if leaf in of_leaf):
            group.nodes += other.nodes
            group.leaves |= other.leaves
        of_leaf.update(dict.fromkeys(group.leaves, group))
    return [*dict.fromkeys(of_leaf.values())]


def _leaves_beside(node: Node, path: dict[Node, None]) -> dict[Tensor, None]:
    """The leaves that get gradients from a node of the path other than along it."""
    seen, leaves = set[Node](), dict[Tensor, None]()
    ahead = [node]
    while ahead:
        for following, _ in ahead.pop().next_functions:
            if following is not None and following not in path and following not in seen:
                seen.add(following)
                ahead.append(following)
                if hasattr(following, "variable"):
                    leaves[following.variable] = None
    return leaves
