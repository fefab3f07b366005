"""Images in messages: data URLs -> pictures. Reads nothing from the network."""

from __future__ import annotations

import base64
import binascii
import io
import re
import warnings
from typing import Any

from hf_paged.serving.problems import Problem
from hf_paged.serving.settings import Limits

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_DATA = re.compile(r"data:image/[a-z0-9.+-]+;base64,", re.IGNORECASE)


def read_picture(url: str, limits: Limits, where: str) -> Any:
    """The picture of a data URL, in RGB; of an animation the first one. The size is read and checked before the pixels
    are. Raises Problem (400) for anything else."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    head = _DATA.match(url[:64])
    if head is None:
        shown = url[:40] + ("..." if len(url) > 40 else "")
        raise _wrong(where, f"url is {shown!r}; write data:image/png;base64,... (this server fetches nothing)")
    try:
        data = base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise _wrong(where, f"the data is not base64: {error}") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Pillow, about sizes, which are checked here
            picture = Image.open(io.BytesIO(data), formats=FORMATS)
            width, height = picture.size
            if width * height > limits.image_pixels:
                most = limits.image_pixels
                raise _wrong(where, f"it has {width} x {height} pixels, and this server takes {most}; scale it down")
            return ImageOps.exif_transpose(picture).convert("RGB")
    except UnidentifiedImageError as error:
        raise _wrong(where, f"the data is no image in {', '.join(FORMATS)}") from error
    except Problem:
        raise
    except Exception as error:  # Pillow raises errors of any class for damaged data, as struct.error for EXIF
        raise _wrong(where, f"the image cannot be read: {error}") from error


def _wrong(where: str, text: str) -> Problem:
    return Problem(400, f"{where}: {text}", param="messages", code="invalid_image")
