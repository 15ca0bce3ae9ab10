"""A model's GGUF file with its weights in 16 bits, of the same values as the file it is made from.

Engines that read GGUF then read as many bytes of weights as those that run a model in bfloat16.
"""

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

OWN: Final = "gguf"  # the weights as the package has them
TYPES: Final = {"f16": 1, "bf16": 32}  # and the number of the file's type in the format
NOT_COPIED: Final = frozenset(
    {"general.architecture", "general.file_type", "general.quantization_version"}
)


def weights(path: str, kind: str) -> Path:
    """The file with weights of that kind, which is made at the first use.

    Raises:
        ValueError: the kind is not known.
    """
    source = Path(path)
    if kind == OWN:
        return source
    if kind not in TYPES:
        raise ValueError(f"weights are {OWN}, {' or '.join(TYPES)}, not {kind!r}")
    made = Path(os.environ["PEERS_FOLDER"]) / f"{source.stem}.{kind}.gguf"
    if not made.exists():
        with TemporaryDirectory(dir=made.parent) as folder:
            part = Path(folder) / made.name
            write(source, part, kind)
            part.rename(made)
    return made


def write(source: Path, target: Path, kind: str) -> None:
    """Write all tensors that are quantized in 16 bits, and the others as they are."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
    from gguf.quants import dequantize, quantize

    reader = GGUFReader(source)
    writer = GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in NOT_COPIED:
            continue
        of_items = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=of_items)
    writer.add_file_type(TYPES[kind])
    wanted = GGMLQuantizationType[kind.upper()]
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        if tensor.tensor_type == GGMLQuantizationType.F32:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, quantize(values, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
