"""The board's camera, by the class Camera of github.com/cnadler86/micropython-camera-API."""

from esp32_agent.port.base import Camera, CameraError
from esp32_agent.port.pictures import picture_shape, rgb565_tensor

WIDTH = 320
HEIGHT = 240


class BoardCamera(Camera):
    """Frames of 320x240 in RGB565, cut to their middle square and made smaller."""

    name = "camera"

    def __init__(self, camera: object, input_bytes: int) -> None:
        self._camera = camera
        self._side, self._channels = picture_shape(input_bytes)

    def frame(self) -> bytes:
        try:
            picture = self._camera.capture()
        except (OSError, RuntimeError) as error:
            raise CameraError(f"The camera failed: {error}") from None
        if not picture:
            raise CameraError("The camera gave no frame.")
        return rgb565_tensor(picture, WIDTH, HEIGHT, self._side, self._channels)


def open_camera() -> object:
    """The camera with the pins of the firmware's board definition. Raises CameraError."""
    try:
        from camera import Camera as Driver
        from camera import FrameSize, PixelFormat
    except ImportError:
        raise CameraError("This firmware has no module camera: set the input's source to fixed.") from None
    try:
        return Driver(pixel_format=PixelFormat.RGB565, frame_size=FrameSize.QVGA)
    except (OSError, RuntimeError, ValueError) as error:
        raise CameraError(f"The camera does not start: {error}") from None
