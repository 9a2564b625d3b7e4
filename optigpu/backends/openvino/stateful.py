"""Makes the cache of a converted decoder state of its infer requests, which OpenVINO then keeps in its own form.

The inputs and outputs have the names that OpenVINO's pipelines for text look for.
"""

from collections.abc import Iterator, Sequence

from optigpu.backends.openvino.library import apply_make_stateful_transformation, ops, ov

ORDER = "beam_idx"
"""The input that says which row each row goes on from."""
LOGITS = "logits"
_ROWS = 0
"""The dimension of the rows in keys and values."""


def cache_names(kind: str, layers: int) -> list[str]:
    """Of the keys and values of all layers; `kind` is "past" or "present"."""
    return [f"{kind}.{layer}.{part}" for layer in range(layers) for part in ("key", "value")]


def name_ports(model: ov.Model, first: Sequence[str], layers: int) -> None:
    """Names the inputs, which are `first` and the past, and the outputs, the logits and the present."""
    for ports, names in (
        (model.inputs, [*first, *cache_names("past", layers)]),
        (model.outputs, [LOGITS, *cache_names("present", layers)]),
    ):
        for port, name in zip(ports, names, strict=True):
            port.get_tensor().set_names({name})


def make_stateful(model: ov.Model, layers: int) -> None:
    """The past becomes state that begins empty with as many rows as ORDER has, and that the present is assigned to."""
    order = ops.parameter([-1], ov.Type.i32, name=ORDER)
    order.output(0).get_tensor().set_names({ORDER})
    model.add_parameters([order])
    past = cache_names("past", layers)
    for name in past:
        port = model.input(name)
        readers = port.get_target_inputs()
        taken = ops.gather(port, order, ops.constant(_ROWS, ov.Type.i64))
        for reader in readers:
            reader.replace_source_output(taken.output(0))
    model.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(model, dict(zip(past, cache_names("present", layers), strict=True)))
    for read in list(_reads(model)):
        read.set_arguments([_empty_like(read, order).output(0)])
    model.validate_nodes_and_infer_types()


def _reads(model: ov.Model) -> Iterator[ov.Node]:
    return (each for each in model.get_ordered_ops() if each.get_type_name() == "ReadValue")


def _empty_like(read: ov.Node, order: ov.Node) -> ov.Node:
    """Keys or values [rows, heads, 0, size]."""
    _, heads, _, size = read.get_output_partial_shape(0)
    rows = ops.shape_of(order, output_type="i64")
    rest = ops.constant([heads.get_length(), 0, size.get_length()], ov.Type.i64)
    return ops.broadcast(ops.constant(0.0, ov.Type.f32), ops.concat([rows, rest], axis=0))
