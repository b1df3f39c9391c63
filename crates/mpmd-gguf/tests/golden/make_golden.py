"""Makes the files of this folder with the Python package `gguf`, the format's own.

    python make_golden.py

`TYPE.decoded` and `TYPE.encoded`: blocks of a type, then their values as little-endian f32. Values of
`decoded` are made from blocks, blocks of `encoded` from values. The blocks have all quantised values,
and scales that are ordinary, zero, subnormal, the largest, infinite and NaN. `metadata.gguf` and
`split-…gguf` are whole files. Needs gguf 0.17 or later and numpy; the result is the same each time.
"""

from pathlib import Path

import numpy as np
from gguf import GGUFValueType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize

FOLDER = Path(__file__).parent

# Number of elements in each file.
ELEMENTS = 2048

# Bit patterns of half-precision scales, beside ordinary ones.
SCALES = [0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x7BFF, 0xFBFF, 0x7C00, 0x7E00]

# Offsets of the half-precision numbers in a block of each type.
SCALE_OFFSETS = {
    Type.Q4_0: [0],
    Type.Q4_1: [0, 2],
    Type.Q5_0: [0],
    Type.Q5_1: [0, 2],
    Type.Q8_0: [0],
    Type.Q2_K: [80, 82],
    Type.Q3_K: [108],
    Type.Q4_K: [0, 2],
    Type.Q5_K: [0, 2],
    Type.Q6_K: [208],
    Type.IQ4_NL: [0],
    Type.IQ4_XS: [0],
}
ENCODED = [Type.F32, Type.F16, Type.BF16, Type.Q4_0, Type.Q8_0]


def blocks_of(kind, random):
    """Returns blocks of random bytes with scales that reach all cases."""
    elements, size = GGML_QUANT_SIZES[kind]
    # Half of the blocks have ordinary scales, at least.
    count = max(ELEMENTS // elements, 2 * len(SCALES))
    blocks = random.integers(0, 256, (count, size), dtype=np.uint8)
    for offset in SCALE_OFFSETS.get(kind, []):
        ordinary = random.normal(0, 0.02, count).astype(np.float16).view(np.uint16)
        ordinary[-len(SCALES) :] = random.permutation(SCALES)
        blocks[:, offset : offset + 2] = ordinary.view(np.uint8).reshape(count, 2)
    if kind == Type.MXFP4:
        blocks[:, 0] = np.linspace(0, 255, count).round()
        blocks[:6, 0] = [0, 1, 2, 3, 254, 255]
    if kind == Type.F16:
        blocks[: len(SCALES)] = np.array(SCALES, "<u2").view(np.uint8).reshape(-1, 2)
    return blocks


def values_of(kind, random):
    """Returns values in blocks of very different sizes."""
    blocks = random.normal(0, 1, (ELEMENTS // 32, 32)).astype(np.float32)
    blocks *= np.float32(10.0) ** random.integers(-9, 5, (len(blocks), 1)).astype(np.float32)
    blocks[0] = 0
    blocks[1] = -0.0
    blocks[2] = np.arange(32) - 15.5
    blocks[3] = np.arange(32) * np.float32(127 / 31)
    blocks[4, ::2] = blocks[4, 1::2] = 3.0
    blocks[5, ::2], blocks[5, 1::2] = -7.0, 7.0
    # The scale is zero in half precision, and its inverse is finite.
    blocks[6] = np.float32(1e-36) * np.arange(32)
    if kind in (Type.F16, Type.BF16):
        blocks[7] = 65504 + np.arange(32)
        blocks[8] = np.float32(2) ** -24 * np.arange(32) / 4
        blocks[9, :2] = [np.inf, -np.inf]
        blocks[9, 2:] = 1 + np.arange(30) * np.float32(2) ** -12
    return blocks.astype(np.float32)


def write_vectors():
    for path in FOLDER.glob("*.*coded"):
        path.unlink()
    for kind in [*SCALE_OFFSETS, Type.F32, Type.F16, Type.BF16, Type.MXFP4]:
        random = np.random.default_rng(int(kind))
        blocks = blocks_of(kind, random)
        with np.errstate(all="ignore"):
            values = dequantize(blocks, kind).astype("<f4")
        (FOLDER / f"{kind.name}.decoded").write_bytes(blocks.tobytes() + values.tobytes())
    for kind in ENCODED:
        values = values_of(kind, np.random.default_rng(100 + int(kind)))
        with np.errstate(all="ignore"):
            blocks = quantize(values, kind)
        (FOLDER / f"{kind.name}.encoded").write_bytes(blocks.tobytes() + values.tobytes())


def write_metadata():
    """Writes a file with a value of each type, and tensors of up to four dimensions."""
    writer = GGUFWriter(FOLDER / "metadata.gguf", "example")
    writer.add_uint8("value.u8", 200)
    writer.add_int8("value.i8", -100)
    writer.add_uint16("value.u16", 60000)
    writer.add_int16("value.i16", -30000)
    writer.add_uint32("value.u32", 4_000_000_000)
    writer.add_int32("value.i32", -2_000_000_000)
    writer.add_float32("value.f32", 0.1)
    writer.add_bool("value.bool", True)
    writer.add_string("value.text", "Grüße, 世界")
    writer.add_uint64("value.u64", 2**63 + 1)
    writer.add_int64("value.i64", -(2**62))
    writer.add_float64("value.f64", 0.1)
    writer.add_array("array.text", ["a", "", "ünï", "long " * 20])
    writer.add_key_value("array.u16", [1, 2, 65535], GGUFValueType.ARRAY, GGUFValueType.UINT16)
    writer.add_array("array.f32", [0.5, -1.5])
    writer.add_array("array.bool", [True, False])
    writer.add_array("array.arrays", [[1, 2], [3]])
    writer.add_custom_alignment(64)

    whole = np.arange(2 * 3 * 5 * 7, dtype=np.float32).reshape(2, 3, 5, 7)
    writer.add_tensor("four", whole)
    writer.add_tensor("half", (whole[0, 0] / 8).astype(np.float16))
    experts = (np.arange(3 * 4 * 64, dtype=np.float32).reshape(3, 4, 64) - 300) / 16
    writer.add_tensor("experts", quantize(experts, Type.Q8_0), raw_dtype=Type.Q8_0)
    writer.add_tensor("one", np.arange(9, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_split():
    """Writes five tensors in three parts."""
    writer = GGUFWriter(FOLDER / "split.gguf", "example", split_max_tensors=2)
    for index in range(5):
        writer.add_tensor(f"blk.{index}.weight", np.full((2, 4), index, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


write_vectors()
write_metadata()
write_split()
