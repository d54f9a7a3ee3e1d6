"""Images: read with Pillow, and turned into numbers as a preprocessor_config.json says (CLIP, SigLIP, LLaVA, Gemma 3,
Qwen2-VL and Qwen3-VL).

    bytes ──open_image──▶ PIL image ──ImageSteps.pixels──▶ (3, H, W) fp32 ──PatchForm.units──▶ rows of patches

Image files may come from anybody: which formats are read and how many pixels an image may have is decided here (where
files may lie, in data/media.py); a file that breaks a rule is a BadImage, which names the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import DataError
from phalanx.data.media import BadMedia

CONFIG = "preprocessor_config.json"
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV", "LAB")
MAX_PIXELS = 1 << 26
MAX_RATIO = 200  # of a resized image's sides, for Qwen2-VL


class BadImage(BadMedia):
    """An image that is not read: damaged, hostile, or of a kind that cannot be used."""


def size_of(data: bytes, name: str) -> tuple[int, int]:
    """(height, width) as stored pixels are shown, from the header alone: nothing is decoded. BadImage as
    `open_image`."""
    image = _header(data, name)
    with _decoding(name):
        sideways = image.getexif().get(0x0112, 1) in (5, 6, 7, 8)
    return (image.width, image.height) if sideways else (image.height, image.width)


def open_image(data: bytes, name: str) -> Image.Image:
    """The decoded image in RGB: turned as its EXIF data says, transparent pixels over white; of several frames the
    first. BadImage if it is damaged, has too many pixels, or a format or mode that is not read; `name` for messages."""
    image = _header(data, name)
    with _decoding(name):
        image.load()
        return _rgb(ImageOps.exif_transpose(image))


@contextmanager
def _decoding(name: str) -> Iterator[None]:
    """Whatever a damaged file leads a decoder to raise becomes a BadImage."""
    try:
        yield
    except Exception as error:  # of many kinds: OSError, SyntaxError, struct.error, zlib.error, ...
        raise BadImage(f"{name}: damaged or cut short: {error}") from error


def _header(data: bytes, name: str) -> Image.Image:
    try:
        with _decoding(name):
            image = Image.open(BytesIO(data), formats=FORMATS)
    except BadImage as error:
        if isinstance(error.__cause__, Image.DecompressionBombError):
            raise BadImage(f"{name}: far too many pixels; an image may have {MAX_PIXELS:,}") from error
        if isinstance(error.__cause__, UnidentifiedImageError):
            raise BadImage(f"{name}: no image of a format that is read ({', '.join(FORMATS)})") from error
        raise
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise BadImage(f"{name}: {width:,} x {height:,} pixels; an image may have {MAX_PIXELS:,}")
    if width < 1 or height < 1:
        raise BadImage(f"{name}: has no pixels")
    if image.mode not in MODES:
        raise BadImage(f"{name}: mode {image.mode!r} is not read ({', '.join(MODES)}): convert it to RGB")
    return image


def _rgb(image: Image.Image) -> Image.Image:
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        whole = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", whole.size, (255, 255, 255, 255)), whole).convert("RGB")
    return image.convert("RGB")


# ---- steps

Fit = Literal["none", "shortest", "exact", "pixels"]


@dataclass(frozen=True, kw_only=True)
class ImageSteps:
    """What becomes of an RGB image, in this order.

    square    padded to a square with the mean colour (LLaVA)
    fit       none; shortest: the shorter side gets size[0] pixels; exact: size (height, width); pixels: both sides
              multiples of `multiple`, between size[0] and size[1] pixels in all (Qwen2-VL's "smart resize")
    resample  filter of Pillow
    crop      (height, width) cut out of the middle, zeros where the image is smaller; None: nothing
    scale     factor of the colours 0 .. 255, which then lose `mean` and are divided by `std`
    """

    square: bool = False
    fit: Fit = "none"
    size: tuple[int, int] = (0, 0)
    multiple: int = 1
    resample: int = Image.Resampling.BICUBIC
    crop: tuple[int, int] | None = None
    scale: float | None = 1 / 255
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    def size_after(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of what becomes of an image. BadImage if its sides are too unequal."""
        if self.square:
            height = width = max(height, width)
        height, width = self._resized(height, width)
        return (height, width) if self.crop is None else self.crop

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        match self.fit:
            case "exact":
                return self.size
            case "shortest":
                long = int(self.size[0] * max(height, width) / min(height, width))
                return (long, self.size[0]) if width <= height else (self.size[0], long)
            case "pixels":
                return smart_size(height, width, self.multiple, *self.size)
        return height, width

    def pixels(self, image: Image.Image) -> NDArray[np.float32]:
        """(3, height, width)."""
        if self.square:
            image = _in_square(image, tuple(int(colour * 255) for colour in self.mean or (0.0, 0.0, 0.0)))
        if self.fit != "none":
            height, width = self._resized(image.height, image.width)
            image = image.resize((width, height), resample=Image.Resampling(self.resample))
        found = np.array(image)
        if self.crop is not None:
            found = _cropped(found, *self.crop)
        values = np.multiply(found, 1.0 if self.scale is None else self.scale, dtype=np.float64).astype(np.float32)
        if self.mean is not None and self.std is not None:
            values = (values - np.array(self.mean, np.float32)) / np.array(self.std, np.float32)
        return np.ascontiguousarray(values.transpose(2, 0, 1))


def smart_size(height: int, width: int, multiple: int, least: int, most: int) -> tuple[int, int]:
    """The sides of an image as multiples of `multiple` with about its ratio, and between `least` and `most` pixels
    (Wang et al., "Qwen2-VL", 2024). BadImage if one side is more than MAX_RATIO times the other."""
    if max(height, width) > MAX_RATIO * min(height, width):
        raise BadImage(f"an image of {width:,} x {height:,} pixels: one side is over {MAX_RATIO} times the other")
    sides = [round(side / multiple) * multiple for side in (height, width)]
    if sides[0] * sides[1] > most:
        shrink = math.sqrt(height * width / most)
        sides = [max(multiple, math.floor(side / shrink / multiple) * multiple) for side in (height, width)]
    elif sides[0] * sides[1] < least:
        grow = math.sqrt(least / (height * width))
        sides = [math.ceil(side * grow / multiple) * multiple for side in (height, width)]
    return sides[0], sides[1]


def _in_square(image: Image.Image, colour: tuple[int, ...]) -> Image.Image:
    side = max(image.size)
    if image.width == image.height:
        return image
    found = Image.new("RGB", (side, side), colour)
    found.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return found


def _cropped(pixels: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """The middle of (H, W, 3); where it is smaller, zeros around it."""
    h, w = max(height, pixels.shape[0]), max(width, pixels.shape[1])
    if (h, w) != pixels.shape[:2]:
        whole = np.zeros((h, w, 3), pixels.dtype)
        top, left = -(-(h - pixels.shape[0]) // 2), -(-(w - pixels.shape[1]) // 2)
        whole[top : top + pixels.shape[0], left : left + pixels.shape[1]] = pixels
        # as transformers does: the crop is placed in the image, and then moved by the padding
        up, aside = (pixels.shape[0] - height) // 2 + top, (pixels.shape[1] - width) // 2 + left
        return whole[max(0, up) : min(h, up + height), max(0, aside) : min(w, aside + width)]
    top, left = (h - height) // 2, (w - width) // 2
    return pixels[top : top + height, left : left + width]


# ---- preprocessor_config.json

CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
BILINEAR, BICUBIC = int(Image.Resampling.BILINEAR), int(Image.Resampling.BICUBIC)
# what each processor does where the file does not say: size, crop, filter, mean and deviation
DEFAULTS: dict[str, dict[str, Any]] = {
    "CLIPImageProcessor": {
        "size": {"shortest_edge": 224},
        "crop_size": 224,
        "do_center_crop": True,
        "resample": BICUBIC,
        "of": CLIP,
    },
    "LlavaImageProcessor": {
        "size": {"shortest_edge": 224},
        "crop_size": 224,
        "do_center_crop": True,
        "resample": BICUBIC,
        "of": CLIP,
    },
    "SiglipImageProcessor": {
        "size": {"height": 224, "width": 224},
        "do_center_crop": False,
        "resample": BICUBIC,
        "of": HALF,
    },
    "Gemma3ImageProcessor": {
        "size": {"height": 224, "width": 224},
        "do_center_crop": False,
        "resample": BILINEAR,
        "of": HALF,
    },
    "Qwen2VLImageProcessor": {
        "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
        "do_center_crop": False,
        "resample": BICUBIC,
        "of": CLIP,
    },
}
# names of classes that only differ in what runs them, or in nothing that matters to images
OTHERS = {
    "Qwen25VLImageProcessor": "Qwen2VLImageProcessor",
    "Qwen3VLImageProcessor": "Qwen2VLImageProcessor",
    "CLIPFeatureExtractor": "CLIPImageProcessor",
}


@dataclass(frozen=True)
class Processor:
    """A preprocessor_config.json: its steps, and, where it says them, the side of a patch, copies of it, and the side
    of the squares of patches that become one feature."""

    steps: ImageSteps
    patch: int | None = None
    frames: int | None = None
    side: int | None = None


def read_processor(path: Path) -> Processor:
    """The preprocessor_config.json of a folder, or at this path. DataError says what is not supported."""
    file = path / CONFIG if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{file}: no such file: it says how images become numbers") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file}: cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise DataError(f"{file}: not a JSON object")
    return processor_of(found, str(file))


def processor_of(config: dict[str, Any], where: str = CONFIG) -> Processor:
    """As transformers 5 reads it. DataError names all that is not supported."""
    kind = str(config.get("image_processor_type") or config.get("feature_extractor_type") or "")
    name = kind.removesuffix("Fast").removesuffix("Pil").replace("_", "")
    name = OTHERS.get(name, name)
    if name not in DEFAULTS:
        known = "CLIP, Siglip, Llava, Gemma3, Qwen2VL"
        raise DataError(f"{where}: image_processor_type={kind!r} is not supported ({known} + ImageProcessor)")
    usual = DEFAULTS[name]
    odd = [
        f"{key}={config[key]!r} (supported: {supported})"
        for key, supported in (
            ("do_pan_and_scan", "false"),
            ("do_convert_rgb", "true"),
            ("do_flip_channel_order", "false"),
        )
        if config.get(key) not in (None, supported == "true")
    ]

    def asked(key: str, default: Any) -> Any:
        return default if config.get(key) is None else config[key]

    size = dict(asked("size", usual["size"])) if isinstance(asked("size", usual["size"]), dict) else config["size"]
    multiple = 1
    if name == "Qwen2VLImageProcessor":
        multiple = int(asked("patch_size", 14)) * int(asked("merge_size", 2))
        if isinstance(size, dict):
            for key, old in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")):
                size[key] = asked(old, size.get(key, usual["size"][key]))
    fit, numbers = _fit(size, name, odd) if asked("do_resize", True) else ("none", (0, 0))
    if name == "Qwen2VLImageProcessor" and fit == "none":
        odd.append("do_resize=False (supported: true: sides must be multiples of patches)")
    crop = None
    if asked("do_center_crop", usual["do_center_crop"]):
        given = asked("crop_size", usual.get("crop_size", 224))
        sides = (given, given) if isinstance(given, int) else (given.get("height"), given.get("width"))
        crop = (int(sides[0] or 0), int(sides[1] or 0))
        odd += [f"crop_size={given!r} (supported: height and width, at least 1)"] if min(crop) < 1 else []
    if asked("do_pad", False) and name != "LlavaImageProcessor":
        odd.append("do_pad=True (supported: false)")
    resample = asked("resample", usual["resample"])
    if resample not in {int(each) for each in Image.Resampling}:
        odd.append(f"resample={resample!r} (supported: 0 to 5)")
    mean, std = (_colours(asked(f"image_{key}", usual["of"][i])) for i, key in enumerate(("mean", "std")))
    if mean is None or std is None or 0.0 in std:
        odd.append("image_mean, image_std: not three numbers each, or a deviation of 0")
    if odd:
        raise DataError(f"{where}: not supported: {'; '.join(odd)}")
    normal = bool(asked("do_normalize", True))
    steps = ImageSteps(
        square=name == "LlavaImageProcessor" and bool(asked("do_pad", False)),
        fit=fit,
        size=numbers,
        multiple=multiple,
        resample=int(resample),
        crop=crop,
        scale=float(asked("rescale_factor", 1 / 255)) if asked("do_rescale", True) else None,
        mean=mean if normal else None,
        std=std if normal else None,
    )
    own = {key: config.get(key) for key in ("patch_size", "temporal_patch_size", "merge_size")}
    if name != "Qwen2VLImageProcessor":
        return Processor(steps)
    return Processor(steps, *(int(v or d) for v, d in zip(own.values(), (14, 2, 2))))


def _fit(size: Any, name: str, odd: list[str]) -> tuple[Fit, tuple[int, int]]:
    """How images are resized."""
    given = (
        {"shortest_edge": size}
        if isinstance(size, int) and name in ("CLIPImageProcessor", "LlavaImageProcessor")
        else size
    )
    given = {"height": given, "width": given} if isinstance(given, int) else given
    keys = {k: v for k, v in given.items() if v is not None} if isinstance(given, dict) else {}
    whole = all(isinstance(v, int) and v >= 1 for v in keys.values())
    if whole and name == "Qwen2VLImageProcessor" and set(keys) == {"shortest_edge", "longest_edge"}:
        return "pixels", (keys["shortest_edge"], keys["longest_edge"])
    if whole and name != "Qwen2VLImageProcessor" and set(keys) == {"shortest_edge"}:
        return "shortest", (keys["shortest_edge"], 0)
    if whole and name != "Qwen2VLImageProcessor" and set(keys) == {"height", "width"}:
        return "exact", (keys["height"], keys["width"])
    odd.append(f"size={size!r} (supported: height and width, or shortest_edge; of Qwen2-VL shortest_ and longest_edge)")
    return "none", (0, 0)


def _colours(given: Any) -> tuple[float, ...] | None:
    values = [given] * 3 if isinstance(given, (int, float)) else given
    if (
        not isinstance(values, (list, tuple))
        or len(values) != 3
        or not all(isinstance(v, (int, float)) for v in values)
    ):
        return None
    return tuple(float(v) for v in values)
