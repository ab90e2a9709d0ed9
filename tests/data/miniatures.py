"""Each published format in miniature, written the way its makers write it."""

import io
import pickle
import struct

import numpy as np
from PIL import Image


def encoded(image: np.ndarray, format: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format)
    return buffer.getvalue()


def python2_batch(entries: dict[bytes, object]) -> bytes:
    """A pickle as Python 2 wrote CIFAR's: protocol 2, all strings bytes, the array through numpy.core.multiarray."""

    def text(value: bytes) -> bytes:
        return (
            b"U" + struct.pack("<B", len(value)) + value
            if len(value) < 256
            else b"T" + struct.pack("<I", len(value)) + value
        )

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    def array(value: np.ndarray) -> bytes:
        shape = b"(" + b"".join(number(size) for size in value.shape) + b"t"
        dtype = (
            b"cnumpy\ndtype\n("
            + text(b"u1")
            + b"K\x00K\x01tR(K\x03"
            + text(b"|")
            + b"NNN"
            + number(-1)
            + number(-1)
            + b"K\x00tb"
        )
        empty = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00t" + text(b"b") + b"tR"
        return empty + b"(K\x01" + shape + dtype + b"\x89" + text(value.tobytes()) + b"tb"

    body = b""
    for key, value in entries.items():
        if isinstance(value, np.ndarray):
            pickled = array(value)
        elif isinstance(value, list):
            pickled = b"](" + b"".join(number(v) if isinstance(v, int) else text(v) for v in value) + b"e"
        else:
            pickled = text(value)
        body += text(key) + pickled + b"s"
    return b"\x80\x02}" + body + b"."


class Cifar:
    """`n` images in every file: pixels [files, n, 32, 32, 3], labels [files, n]; the last file is the test set."""

    def __init__(self, files: int, n: int, classes: int, seed: int):
        rng = np.random.default_rng(seed)
        self.images = rng.integers(0, 256, (files, n, 32, 32, 3), dtype=np.uint8)
        self.labels = rng.integers(0, classes, (files, n))
        self.coarse = self.labels // 5

    def planes(self, file: int) -> np.ndarray:
        return self.images[file].transpose(0, 3, 1, 2).reshape(-1, 3072)

    @property
    def train(self) -> np.ndarray:
        return self.images[:-1].reshape(-1, 32, 32, 3)

    @property
    def train_labels(self) -> np.ndarray:
        return self.labels[:-1].reshape(-1)


CIFAR10_NAMES = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]


def write_cifar10_binary(cifar, folder):
    folder.mkdir(parents=True)
    for file, name in enumerate(CIFAR10_NAMES):
        rows = np.concatenate([cifar.labels[file][:, None].astype(np.uint8), cifar.planes(file)], axis=1)
        (folder / f"{name}.bin").write_bytes(rows.tobytes())
    return folder


def write_cifar10_python(cifar, folder):
    folder.mkdir(parents=True)
    for file, name in enumerate(CIFAR10_NAMES):
        entries = {
            b"batch_label": f"training batch {file + 1} of 5".encode(),
            b"labels": cifar.labels[file].tolist(),
            b"data": cifar.planes(file),
            b"filenames": [f"image_s_{i:06d}.png".encode() for i in range(len(cifar.labels[file]))],
        }
        (folder / name).write_bytes(python2_batch(entries))
    return folder


def write_cifar100(cifar, folder, *, binary):
    folder.mkdir(parents=True)
    for file, name in enumerate(["train", "test"]):
        coarse, fine = cifar.coarse[file], cifar.labels[file]
        if binary:
            rows = np.concatenate([coarse[:, None], fine[:, None], cifar.planes(file)], axis=1).astype(np.uint8)
            (folder / f"{name}.bin").write_bytes(rows.tobytes())
        else:
            batch = {b"data": cifar.planes(file), b"fine_labels": fine.tolist(), b"coarse_labels": coarse.tolist()}
            (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    return folder


_TFDS_VERSIONS = {"cifar10": "3.0.2", "stl10": "1.0.0"}


def prepare_tfds(data_dir, name, features, examples):
    """Prepare a dataset as TFDS does, shuffled array_record files and all, without TensorFlow."""
    import tensorflow_datasets as tfds

    makers = {
        "image": lambda: tfds.features.Image(shape=(None, None, 3)),
        "id": tfds.features.Text,
        "file_name": tfds.features.Text,
        "label": lambda: tfds.features.ClassLabel(num_classes=1000),
        "identity": lambda: {"Identity_No": np.int64},
    }

    class Miniature(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version(_TFDS_VERSIONS.get(name, "1.0.0"))

        def _info(self):
            columns = tfds.features.FeaturesDict({feature: makers[feature]() for feature in features})
            return tfds.core.DatasetInfo(builder=self, features=columns)

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            for key, example in enumerate(examples):
                yield key, {**example, "image": io.BytesIO(encoded(example["image"]))}

    Miniature.name = name
    Miniature(data_dir=data_dir, file_format="array_record").download_and_prepare()
