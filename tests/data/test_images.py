"""Images against transformers' own processors, bit by bit; and files that are damaged, hostile or out of place."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from phalanx.base.errors import DataError
from phalanx.data.images import BadImage, open_image, processor_of, read_processor, size_of
from phalanx.data.media import BadMedia, media_path, read_bytes
from phalanx.sequence.patches import COLUMN, ROW, WINDOW, PatchForm

SIZES = [(40, 30), (30, 40), (64, 64), (7, 50), (201, 113), (90, 300)]  # height, width


def image_of(height: int, width: int, mode: str = "RGB") -> Image.Image:
    rng = np.random.default_rng(height * 1000 + width)
    smooth = rng.integers(0, 256, (3 + height // 9, 3 + width // 9, 3), np.uint8)
    return Image.fromarray(smooth).resize((width, height)).convert(mode)


def png(image: Image.Image, format: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def theirs(kind: str, **config: object):
    """A processor of transformers that runs on Pillow."""
    import transformers.models as models

    module = {
        "CLIP": "clip.image_processing_pil_clip",
        "Siglip": "siglip.image_processing_pil_siglip",
        "Llava": "llava.image_processing_pil_llava",
        "Gemma3": "gemma3.image_processing_pil_gemma3",
        "Qwen2VL": "qwen2_vl.image_processing_pil_qwen2_vl",
    }[kind]
    found = __import__(f"{models.__name__}.{module}", fromlist=["x"])
    return getattr(found, f"{kind}ImageProcessorPil")(**config)


CASES = {
    "clip": ("CLIP", {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}),
    "clip, a crop larger than the image": ("CLIP", {"do_resize": False, "crop_size": {"height": 65, "width": 57}}),
    "clip, not normalized": ("CLIP", {"size": {"shortest_edge": 28}, "crop_size": 28, "do_normalize": False}),
    "siglip": ("Siglip", {"size": {"height": 28, "width": 42}}),
    "llava, padded": (
        "Llava",
        {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}, "do_pad": True},
    ),
    "llava, cropped": ("Llava", {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}),
    "gemma3": ("Gemma3", {"size": {"height": 56, "width": 56}, "do_convert_rgb": None}),
}


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_pixels_are_those_of_transformers(case, size):
    kind, config = CASES[case]
    processor = theirs(kind, **config)
    image = image_of(*size)
    expected = processor(image, return_tensors="np")["pixel_values"][0]
    steps = processor_of({**processor.to_dict(), **config}).steps
    found = steps.pixels(open_image(png(image), "a.png"))
    assert found.dtype == np.float32 and found.tobytes() == np.ascontiguousarray(expected, np.float32).tobytes()
    assert steps.size_after(*size) == found.shape[1:]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(
    "config",
    [
        {"min_pixels": 28 * 28 * 2, "max_pixels": 28 * 28 * 9},
        {"size": {"shortest_edge": 32 * 32 * 2, "longest_edge": 32 * 32 * 30}, "patch_size": 16},
    ],
    ids=["qwen2.5-vl", "qwen3-vl"],
)
def test_patches_are_those_of_qwens(config, size):
    processor = theirs("Qwen2VL", **config)
    image = image_of(*size)
    expected = processor(image, return_tensors="np")
    found = processor_of({"image_processor_type": "Qwen2VLImageProcessorFast", **config})
    assert (found.patch, found.frames, found.side) == (config.get("patch_size", 14), 2, 2)
    form = PatchForm(found.patch, frames=2, side=2)
    pixels = found.steps.pixels(open_image(png(image), "a.png"))
    units = form.units(pixels, "a.png")
    assert units.values.tobytes() == expected["pixel_values"].tobytes()
    grid = expected["image_grid_thw"][0]
    assert grid.tolist() == [1, pixels.shape[1] // form.size, pixels.shape[2] // form.size]
    assert form.rows(*pixels.shape[1:]) == len(units.values) == grid.prod()
    assert form.tokens(*pixels.shape[1:]) == len(units.features) == grid.prod() // 4


def test_rows_sorted_by_window_are_found_by_the_text():
    form = PatchForm(2, side=2, window=4)
    pixels = np.random.default_rng(0).random((3, 12, 20), np.float32)
    plain, units = PatchForm(2, side=2).units(pixels), form.units(pixels)
    assert (np.diff(units.coordinates[:, WINDOW]) >= 0).all() and units.coordinates[:, WINDOW].max() == 5
    for own, at in zip(plain.features, units.features):
        assert (plain.values[own : own + 4] == units.values[at : at + 4]).all()
    for (row, column, *_), values in zip(units.coordinates, units.values):
        patch = pixels[:, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
        assert (patch.reshape(-1) == values).all()
    edges = units.coordinates[:, [ROW, COLUMN]] // 4
    assert (units.coordinates[:, WINDOW] == edges[:, 0] * 3 + edges[:, 1]).all()


def test_a_class_token_comes_first_and_is_no_patch():
    pixels = np.ones((3, 4, 4), np.float32)
    for reads in (False, True):
        units = PatchForm(2, classed=True, reads_class=reads).units(pixels)
        assert units.sizes == (5,) and not units.values[0].any() and units.coordinates[0, ROW] == -1
        assert units.features.tolist() == ([0] if reads else []) + [1, 2, 3, 4]


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "LA", "CMYK", "1"])
def test_modes_become_rgb_as_in_transformers(mode):
    image = image_of(20, 24, mode)
    if "A" in mode:
        image.putalpha(Image.fromarray(np.arange(480, dtype=np.uint8).reshape(20, 24)))
    format = "TIFF" if mode == "CMYK" else "PNG"
    data = png(image, format)
    expected = theirs("Siglip", size={"height": 28, "width": 28})(Image.open(io.BytesIO(data)), return_tensors="np")
    config = {"image_processor_type": "SiglipImageProcessor", "size": {"height": 28, "width": 28}}
    found = processor_of(config).steps.pixels(open_image(data, "a"))
    assert found.tobytes() == expected["pixel_values"][0].tobytes()


def test_an_image_is_turned_as_its_exif_data_says():
    image, exif = image_of(20, 30), Image.Exif()
    exif[0x0112] = 6
    data = png(image, "JPEG", exif=exif, quality=100)
    assert size_of(data, "a.jpg") == (30, 20) and open_image(data, "a.jpg").size == (20, 30)


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it has many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    )


HOSTILE = {
    "no image": (b"not an image at all", "no image of a format that is read"),
    "empty": (b"", "no image of a format that is read"),
    "SVG": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no image of a format that is read"),
    "too many pixels": (bomb(9000, 9000), "9,000 x 9,000 pixels; an image may have 67,108,864"),
    "far too many pixels": (bomb(60000, 60000), "far too many pixels; an image may have 67,108,864"),
    "cut short": (png(image_of(200, 200))[:4000], "damaged or cut short"),
    "a JPEG cut short": (png(image_of(200, 200), "JPEG")[:900], "damaged or cut short"),
    "fewer rows than it says": (bomb(100, 100), "damaged or cut short"),
    "16 bits": (png(Image.fromarray(np.zeros((4, 4), np.uint16))), "mode 'I;16' is not read"),
    "floats": (png(Image.fromarray(np.zeros((4, 4), np.float32)), "TIFF"), "mode 'F' is not read"),
    "a PostScript file": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no image of a format that is read"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused_by_name(case):
    data, said = HOSTILE[case]
    with pytest.raises(BadImage, match=said) as caught:
        open_image(data, "folder/a.png")
    assert str(caught.value).startswith("folder/a.png: ")


def test_damaged_bytes_never_raise_anything_else():
    rng = np.random.default_rng(3)
    for data in (
        png(image_of(30, 40)),
        png(image_of(30, 40), "JPEG"),
        png(image_of(9, 9), "GIF"),
        png(image_of(9, 9), "WEBP"),
    ):
        for _ in range(60):
            changed = bytearray(data)
            for at in rng.integers(0, len(changed), 4):
                changed[at] = rng.integers(0, 256)
            try:
                size_of(bytes(changed), "a")
                open_image(bytes(changed), "a")
            except BadImage as error:
                assert str(error).startswith("a: ")


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../a.png", "in/../../a.png", "", "link/a.png", "out.png", "http://x/a.png", "a\0b"]
)
def test_no_file_outside_the_folder_is_opened(tmp_path, name):
    folder, other = tmp_path / "data", tmp_path / "other"
    folder.mkdir(), other.mkdir()
    (other / "a.png").write_bytes(png(image_of(9, 9)))
    (folder / "link").symlink_to(other)
    (folder / "out.png").symlink_to(other / "a.png")
    with pytest.raises(BadMedia):
        media_path(folder, name)


def test_files_beside_are_found_and_others_are_named(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").write_bytes(png(image_of(9, 9)))
    assert open_image(read_bytes(media_path(tmp_path, "in/a.png")), "a").size == (9, 9)
    with pytest.raises(BadMedia, match="b.png: no such file"):
        read_bytes(media_path(tmp_path, "b.png"))
    with pytest.raises(BadMedia, match="in: no such file"):
        read_bytes(media_path(tmp_path, "in"))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"image_processor_type": "ViTImageProcessor"}, "image_processor_type='ViTImageProcessor' is not supported"),
        ({}, "image_processor_type='' is not supported"),
        ({"image_processor_type": "Gemma3ImageProcessor", "do_pan_and_scan": True}, "do_pan_and_scan=True"),
        ({"image_processor_type": "CLIPImageProcessor", "size": {"longest_edge": 9}}, "size={'longest_edge': 9}"),
        ({"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": -1}}, "size={'shortest_edge': -1}"),
        ({"image_processor_type": "CLIPImageProcessor", "do_convert_rgb": False}, "do_convert_rgb=False"),
        ({"image_processor_type": "CLIPImageProcessor", "do_pad": True, "resample": 9}, "do_pad=True.*resample=9"),
        ({"image_processor_type": "CLIPImageProcessor", "image_std": [1, 0, 1]}, "a deviation of 0"),
        ({"image_processor_type": "CLIPImageProcessor", "crop_size": 0}, "crop_size=0"),
        ({"image_processor_type": "Qwen2VLImageProcessor", "do_resize": False}, "do_resize=False"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_named(config, said):
    with pytest.raises(DataError, match=said):
        processor_of(config)


def test_files_of_processors_that_cannot_be_read(tmp_path):
    with pytest.raises(DataError, match="preprocessor_config.json: no such file"):
        read_processor(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("[]")
    with pytest.raises(DataError, match="not a JSON object"):
        read_processor(tmp_path)
    with pytest.raises(BadImage, match="one side is over 200 times the other"):
        processor_of({"image_processor_type": "Qwen2VLImageProcessor"}).steps.size_after(1, 201)
