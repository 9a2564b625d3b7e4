"""Pictures as int8 tensors."""

from esp32_agent.port.base import CameraError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

RGB_CHANNELS = 3


def picture_shape(input_bytes: int) -> tuple[int, int]:
    """Side and channels of the square picture that has as many bytes: colour where that fits, else grey.

    Raises CameraError if neither does.
    """
    for channels in (RGB_CHANNELS, 1):
        side = 1
        while side * side * channels < input_bytes:
            side += 1
        if side * side * channels == input_bytes:
            return side, channels
    raise CameraError(
        f"An input of {input_bytes} bytes is no square picture: set the input's source to fixed."
    )


def rgb_tensor(data: bytes, width: int, height: int, side: int, channels: int) -> bytes:
    """An int8 tensor of side x side x channels from the middle square of a picture with 3 bytes a pixel.

    A pixel p becomes p - 128, the quantization of inputs in [0, 1] and in [-1, 1].
    """
    check_size(data, width * height * 3)
    tensor = bytearray(side * side * channels)
    at = 0
    for place in middle_square(width, height, side):
        at = put(tensor, at, channels, data[3 * place], data[3 * place + 1], data[3 * place + 2])
    return bytes(tensor)


def rgb565_tensor(data: bytes, width: int, height: int, side: int, channels: int) -> bytes:
    """The same from the ESP32 camera's 2 bytes a pixel, the high byte first."""
    check_size(data, width * height * 2)
    tensor = bytearray(side * side * channels)
    at = 0
    for place in middle_square(width, height, side):
        pixel = data[2 * place] << 8 | data[2 * place + 1]
        red, green, blue = pixel >> 11, pixel >> 5 & 0x3F, pixel & 0x1F
        at = put(tensor, at, channels, red * 255 // 31, green * 255 // 63, blue * 255 // 31)
    return bytes(tensor)


def yuyv_tensor(data: bytes, width: int, height: int, side: int, channels: int) -> bytes:
    """The same from a webcam's YUYV: two pixels in 4 bytes, BT.601 in its limited range."""
    check_size(data, width * height * 2)
    tensor = bytearray(side * side * channels)
    at = 0
    for place in middle_square(width, height, side):
        pair = place // 2 * 4
        light = 298 * (data[2 * place] - 16)
        u, v = data[pair + 1] - 128, data[pair + 3] - 128
        red, green, blue = light + 409 * v, light - 100 * u - 208 * v, light + 516 * u
        at = put(tensor, at, channels, clamp(red + 128 >> 8), clamp(green + 128 >> 8), clamp(blue + 128 >> 8))
    return bytes(tensor)


def middle_square(width: int, height: int, side: int) -> "Iterator[int]":
    """The numbers of the pixels, row by row, that stand for side x side points of the picture's middle square."""
    square = min(width, height)
    left, top = (width - square) // 2, (height - square) // 2
    for row in range(side):
        begin = (top + row * square // side) * width + left
        for column in range(side):
            yield begin + column * square // side


def put(tensor: bytearray, at: int, channels: int, red: int, green: int, blue: int) -> int:
    """Write a pixel, grey with one channel; returns where the next one goes. The sign bit's flip subtracts 128."""
    if channels == 1:
        tensor[at] = (77 * red + 150 * green + 29 * blue >> 8) ^ 0x80
        return at + 1
    tensor[at] = red ^ 0x80
    tensor[at + 1] = green ^ 0x80
    tensor[at + 2] = blue ^ 0x80
    return at + 3


def clamp(value: int) -> int:
    return 0 if value < 0 else min(value, 255)


def check_size(data: bytes, expected: int) -> None:
    """Raises CameraError for a frame that broke off."""
    if len(data) < expected:
        raise CameraError(f"The frame has {len(data)} bytes and not {expected}.")
