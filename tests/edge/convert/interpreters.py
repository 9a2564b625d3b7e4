"""Runs a model on three interpreters: `interpreters.py MODEL GOLDEN`; runs in the Python that has them.

Prints as JSON, for the inputs of golden.bin, the outputs in hexadecimal of LiteRT's reference kernels and of TFLite
Micro, the smallest arena with which TFLite Micro runs, and what LiteRT's own reader says of the operators and tensors.
"""

import json
import struct
import sys
from pathlib import Path

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter, OpResolverType
from tflite_micro.python.tflite_micro import runtime


def golden_inputs(path: Path, shape: list[int]) -> list[np.ndarray]:
    data = path.read_bytes()
    magic, count, size, output = struct.unpack_from("<4sIII", data)
    assert magic == b"OGLD"
    places = [16 + number * (size + output) for number in range(count)]
    return [np.frombuffer(data[place : place + size], np.int8).reshape(shape) for place in places]


def runs(model: bytes, arena: int) -> bool:
    try:
        runtime.Interpreter.from_bytes(model, arena_size=arena)
    except RuntimeError:
        return False
    return True


def smallest_arena(model: bytes) -> int:
    least, most = 1, 2**24
    while least < most:
        middle = (least + most) // 2
        least, most = (least, middle) if runs(model, middle) else (middle + 1, most)
    return least


def main(path: Path, golden: Path) -> None:
    model = path.read_bytes()
    lite = Interpreter(model_content=model, experimental_op_resolver_type=OpResolverType.BUILTIN_REF)
    lite.allocate_tensors()
    entry, result = lite.get_input_details()[0], lite.get_output_details()[0]
    micro = runtime.Interpreter.from_bytes(model, arena_size=2**24)
    outputs: dict[str, list[str]] = {"litert": [], "micro": []}
    for sample in golden_inputs(golden, entry["shape"].tolist()):
        lite.set_tensor(entry["index"], sample)
        lite.invoke()
        outputs["litert"].append(lite.get_tensor(result["index"]).tobytes().hex())
        micro.set_input(sample, 0)
        micro.invoke()
        outputs["micro"].append(np.array(micro.get_output(0)).tobytes().hex())
    read = schema.ModelT.InitFromObj(schema.Model.GetRootAsModel(model, 0))
    graph = read.subgraphs[0]
    names = {code: name for name, code in vars(schema.BuiltinOperator).items() if isinstance(code, int)}
    codes = [max(each.builtinCode, each.deprecatedBuiltinCode) for each in read.operatorCodes]
    print(
        json.dumps(
            outputs
            | {
                "operators": [names[codes[each.opcodeIndex]] for each in graph.operators],
                "shapes": [
                    [] if each.shape is None else [int(n) for n in each.shape] for each in graph.tensors
                ],
                "parameters": sum(0 if each.data is None else len(each.data) for each in read.buffers),
                "input": [
                    float(entry["quantization"][0]),
                    int(entry["quantization"][1]),
                    entry["shape"].tolist(),
                ],
                "output": [
                    float(result["quantization"][0]),
                    int(result["quantization"][1]),
                    result["shape"].tolist(),
                ],
                "smallest_arena": smallest_arena(model),
            }
        )
    )


main(Path(sys.argv[1]), Path(sys.argv[2]))
