import contextlib
import functools
import io
import os
import pathlib
import socket
import struct
import subprocess
import sys
import warnings
import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from miniatures import encoded
from PIL import Image

from dime_jax import data
from dime_jax.data import decoding
from dime_jax.data.batches import Unusable, try_items


def noise(height=20, width=30, channels=3):
    return np.random.default_rng(0).integers(0, 256, (height, width, channels), dtype=np.uint8)


def saved(image, format, **options):
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def png(width, height, depth, colour, rows):
    """A PNG from its parts, for what Pillow does not write: `rows` are the raw bytes of each row."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    compress = zlib.compressobj(1)
    body = b"".join(compress.compress(b"\0" + row) for row in rows) + compress.flush()
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


@functools.cache
def bomb():
    return png(12000, 12000, 8, 2, (bytes(36000) for _ in range(12000)))


def palette_with_alpha():
    image = Image.fromarray(noise()).quantize(16)
    return saved(image, "PNG", transparency=bytes([0, 128] + [255] * 14))


def animation():
    frames = [Image.fromarray(np.full((8, 8, 3), v, np.uint8)) for v in (0, 90, 200)]
    return saved(frames[0], "GIF", save_all=True, append_images=frames[1:])


BAD = {
    "truncated.png": (lambda: encoded(noise())[:-900], "cannot be decoded"),
    "truncated.jpg": (lambda: encoded(noise(200, 200), "JPEG")[:5000], "truncated"),
    "empty.png": (lambda: b"", "not one of PNG, JPEG"),
    "text.png": (lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not one of PNG, JPEG"),
    "postscript.jpg": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not one of PNG, JPEG"),
    "bomb.png": (bomb, "more than 33554432 pixels"),
    "grey16.png": (lambda: png(4, 4, 16, 0, [bytes(8)] * 4), "more than 8 bits"),
    "rgb16.png": (lambda: png(4, 4, 16, 2, [bytes(24)] * 4), "more than 8 bits"),
    "rgba16.png": (lambda: png(4, 4, 16, 6, [bytes(32)] * 4), "more than 8 bits"),
    "float.tiff": (lambda: saved(Image.fromarray(np.zeros((4, 4), np.float32)), "TIFF"), "more than 8 bits"),
    "cmyk.jpg": (lambda: saved(Image.fromarray(noise()).convert("CMYK"), "JPEG"), "is CMYK"),
    "palette_alpha.png": (palette_with_alpha, "has transparency"),
    "rgba.png": (lambda: saved(Image.fromarray(noise(channels=4)), "PNG"), "has transparency"),
    "animated.gif": (animation, "more than one frame"),
    "name\nwith newline.png": (lambda: b"", "not one of"),
    "<b>[red]bold.png": (lambda: b"", "not one of"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_images_are_refused_for_the_right_reason(name):
    content, reason = BAD[name]
    with pytest.raises(data.BadImage, match=reason):
        decoding.decode_image(content())


@pytest.fixture(scope="module")
def hostile_folder(tmp_path_factory):
    """2,000 good images and the bad ones above, with links that leave the folder."""
    root = tmp_path_factory.mktemp("hostile")
    outside = tmp_path_factory.mktemp("outside")
    (outside / "secret.png").write_bytes(encoded(noise()))
    for i in range(2000):
        (root / f"good{i:04d}.png").write_bytes(encoded(np.full((8, 8, 3), i % 256, np.uint8)))
    for name, (content, _) in BAD.items():
        (root / name).write_bytes(content())
    (root / "link.png").symlink_to(outside / "secret.png")
    (root / "dangling.png").symlink_to(root / "nothing.png")
    (root / "link_to_folder").symlink_to(outside)
    (root / "loop.png").symlink_to(root / "loop.png")
    (root / "folder.png").mkdir()
    (root / "notes.txt").write_text("no image")
    os.mkfifo(root / "pipe.png")
    os.mkfifo(root / "pipe")
    with socket.socket(socket.AF_UNIX) as listener, contextlib.chdir(root):
        listener.bind("socket.png")
    with open(os.fsencode(root) + b"/not-utf8-\xff.png", "wb"):
        pass
    (root / "link_inside.png").symlink_to(root / "good0000.png")
    return root


def test_a_hostile_folder_gives_one_line_for_each_bad_file_and_all_good_images(hostile_folder):
    source = data.open_source(f"folder:{hostile_folder}")
    transform = data.get_transform("fit", (8, 8, 3))
    found = list(data.batches(source, 64, transform))
    assert sum(int(batch.mask.sum()) for batch in found) == 2001
    tried = zip(source.ids, try_items(source, lambda item: transform(item.image)))
    bad = {id: one.reason for id, one in tried if isinstance(one, Unusable)}
    assert bad.keys() == {id for batch in found for id, good in zip(batch.ids, batch.mask) if id and not good}
    assert len(bad) == len(BAD) + 8
    for id, reason in bad.items():
        with pytest.raises(data.TooManyBadImages) as error:
            list(data.batches(source, 1, transform, indices=[source.ids.index(id)]))
        _, line = str(error.value).split("\n")
        assert line.isprintable()
        assert line == f"{id!r} {' '.join(reason.split())}"
    assert bad["link.png"] == "is a link that leaves the folder"
    assert bad["link_to_folder"] == "is a link that leaves the folder"
    assert bad["dangling.png"] == "cannot be opened: No such file or directory"
    assert bad["loop.png"] == "cannot be opened: Too many levels of symbolic links"
    assert bad["folder.png"] == "is a folder, not an image file"
    assert bad["pipe.png"] == "is a named pipe, not an image file"
    assert bad["socket.png"].startswith("cannot be opened: ")
    assert "not-utf8-\\xff.png" in bad
    assert data.fingerprint(source) == data.fingerprint(source)


def test_without_the_good_images_the_run_stops_with_the_list(hostile_folder):
    source = data.open_source(f"folder:{hostile_folder}")
    few = [i for i, id in enumerate(source.ids) if not id.startswith("good") or id < "good0100"]
    message = "too many images that cannot be used: must be <= 10% of 125, got 13 so far:\n"
    with pytest.raises(data.TooManyBadImages, match=message):
        list(data.batches(source, 8, data.get_transform("fit", (8, 8, 3)), indices=few))


def test_a_bomb_costs_no_memory(tmp_path):
    (tmp_path / "bomb.png").write_bytes(bomb())
    assert (tmp_path / "bomb.png").stat().st_size < 5_000_000
    code = f"""
import pathlib
from dime_jax.data import decoding
def peak():  # not ru_maxrss, which starts with what the process that started this one had
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
before = peak()
try:
    decoding.decode_image(pathlib.Path({str(tmp_path / "bomb.png")!r}))
except ValueError as error:
    print(peak() - before)
"""
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert int(result.stdout) < 20_000  # KB


def test_reading_a_hostile_folder_stays_under_a_gigabyte(hostile_folder):
    # Not ru_maxrss, which starts with what the process that started this one had.
    code = f"""
from dime_jax import data
source = data.open_source("folder:" + {str(hostile_folder)!r})
list(data.batches(source, 64, data.get_transform("fit", (8, 8, 3))))
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert int(result.stdout) < 2**20  # KB


def test_devices_and_links_to_them_are_no_images(tmp_path):
    with pytest.raises(data.BadImage, match="is a device, not an image file"):
        decoding.decode_image(pathlib.Path("/dev/zero"))
    (tmp_path / "zero.png").symlink_to("/dev/zero")
    with pytest.raises(data.BadImage, match="leaves the folder"):
        data.open_source(f"folder:{tmp_path}")[0]


def test_refusing_a_file_leaves_nothing_open(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    before = os.listdir("/proc/self/fd")
    for place in (tmp_path, tmp_path / "pipe.png", pathlib.Path("/dev/null")):
        with pytest.raises(data.BadImage):
            decoding.decode_image(place)
    assert os.listdir("/proc/self/fd") == before


def test_two_names_never_become_one_id(tmp_path):
    for name in (b"a\xff.png", b"a\\xff.png", b"a\\\\xff.png"):
        with open(os.fsencode(tmp_path) + b"/" + name, "wb") as file:
            file.write(encoded(noise()))
    assert sorted(data.open_source(f"folder:{tmp_path}").ids) == sorted([r"a\xff.png", r"a\\xff.png", r"a\\\\xff.png"])


def test_a_folder_with_an_image_name_is_refused_and_its_images_are_found(tmp_path):
    (tmp_path / "album.png").mkdir()
    (tmp_path / "album.png" / "x.png").write_bytes(encoded(noise()))
    source = data.open_source(f"folder:{tmp_path}")
    assert list(source.ids) == ["album.png", "album.png/x.png"]
    np.testing.assert_array_equal(source[1].image, noise())
    with pytest.raises(data.BadImage, match="is a folder, not an image file"):
        source[0]


def test_links_to_folders_inside_are_not_followed(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.png").write_bytes(encoded(noise()))
    (tmp_path / "b").symlink_to(tmp_path / "a")
    source = data.open_source(f"folder:{tmp_path}")
    assert list(source.ids) == ["a/x.png", "b"]
    with pytest.raises(data.BadImage, match="link to a folder"):
        source[1]


# --- what is accepted, exactly ---


def grey_alpha_opaque():
    image = Image.fromarray(noise(channels=1)[..., 0]).convert("LA")
    return saved(image, "PNG")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (encoded(noise()), noise()),
        (saved(Image.fromarray(noise()), "BMP"), noise()),
        (saved(Image.fromarray(noise()), "TIFF"), noise()),
        (saved(Image.fromarray(noise()), "WEBP", lossless=True), noise()),
        (encoded(noise(channels=1)[..., 0]), np.repeat(noise(channels=1), 3, axis=-1)),
        (grey_alpha_opaque(), np.repeat(noise(channels=1), 3, axis=-1)),
        (saved(Image.fromarray(noise()).convert("RGBA"), "PNG"), noise()),
        (
            saved(Image.fromarray(noise()).quantize(9), "PNG"),
            np.asarray(Image.fromarray(noise()).quantize(9).convert("RGB")),
        ),
        (
            saved(Image.fromarray(noise(8, 8, 1)[..., 0] > 99), "PNG"),
            np.repeat((noise(8, 8, 1) > 99) * np.uint8(255), 3, axis=-1),
        ),
        (saved(Image.fromarray(np.full((4, 4, 3), 7, np.uint8)), "GIF"), np.full((4, 4, 3), 7)),
    ],
)
def test_exact_conversions(content, expected):
    image = decoding.decode_image(content)
    assert image.dtype == np.uint8
    np.testing.assert_array_equal(image, expected)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(orientation):
    exif = Image.Exif()
    exif[0x112] = orientation
    content = saved(Image.fromarray(noise()), "PNG", exif=exif)
    a = noise()
    expected = {
        1: a,
        2: a[:, ::-1],
        3: a[::-1, ::-1],
        4: a[::-1],
        5: a.swapaxes(0, 1),
        6: np.rot90(a, -1),
        7: a[::-1, ::-1].swapaxes(0, 1),
        8: np.rot90(a),
    }[orientation]
    np.testing.assert_array_equal(decoding.decode_image(content), expected)
    np.testing.assert_array_equal(decoding.decode_image(content, "torchvision"), a)


def test_torchvision_style_converts_what_strict_refuses():
    for content in (BAD["cmyk.jpg"][0](), BAD["rgba.png"][0](), BAD["palette_alpha.png"][0]()):
        with warnings.catch_warnings(action="ignore"):  # Pillow's about transparent palettes
            expected = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
        np.testing.assert_array_equal(decoding.decode_image(content, "torchvision"), expected)
    for name in ("rgb16.png", "bomb.png", "animated.gif", "truncated.jpg"):
        with pytest.raises(data.BadImage):
            decoding.decode_image(BAD[name][0](), "torchvision")


def test_camera_files_with_previews_give_the_photo():
    photo, preview = (Image.fromarray(noise(40, 40)), Image.fromarray(noise(10, 10)))
    content = saved(photo, "MPO", save_all=True, append_images=[preview])
    np.testing.assert_array_equal(decoding.decode_image(content), np.asarray(Image.open(io.BytesIO(content))))


def test_unknown_decode_is_refused(tmp_path):
    (tmp_path / "a.png").write_bytes(encoded(noise()))
    with pytest.raises(ValueError, match="unknown decode 'pil'; expected one of strict, torchvision"):
        data.open_source(f"folder:{tmp_path}?decode=pil")


VALID = [encoded(noise(6, 6), f) for f in ("PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF")]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(VALID),
    st.lists(st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=4)), max_size=6),
    st.floats(0, 1),
)
def test_damaged_files_are_decoded_or_refused_and_nothing_else(content, damage, cut):
    content = bytearray(content)
    for place, replacement in damage:
        start = int(place * len(content))
        content[start : start + len(replacement)] = replacement
    content = bytes(content[: int(len(content) * (0.3 + 0.7 * cut))])
    try:
        image = decoding.decode_image(content)
    except data.BadImage as error:
        refused = str(error)
    else:
        refused = ""
        assert image.dtype == np.uint8
        assert image.ndim == 3
    assert "\n" not in refused


def test_a_path_and_its_bytes_decode_to_the_same(tmp_path: pathlib.Path):
    (tmp_path / "a.jpg").write_bytes(encoded(noise(), "JPEG"))
    from_path = decoding.decode_image(tmp_path / "a.jpg")
    np.testing.assert_array_equal(from_path, decoding.decode_image((tmp_path / "a.jpg").read_bytes()))


def test_files_are_read_without_the_flags_of_unix(tmp_path, monkeypatch):
    for name in ("O_NONBLOCK", "O_CLOEXEC", "O_DIRECTORY"):
        monkeypatch.delattr(os, name, raising=False)
    (tmp_path / "a.txt").write_bytes(b"\r\n\x1a")
    with decoding.open_regular(tmp_path / "a.txt") as file:
        assert file.read() == b"\r\n\x1a"
    Image.fromarray(np.zeros((2, 3, 3), np.uint8)).save(tmp_path / "a.png")
    assert decoding.decode_image(tmp_path / "a.png", "strict").shape == (2, 3, 3)
