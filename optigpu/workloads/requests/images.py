"""Images of a size that a model takes."""

from optigpu.documents.shapes import ImageFacts


def wrong_size(model: ImageFacts, image_size: int | None) -> str | None:
    """Why a classifier takes no images of that side, or None; None asks for the side that it was trained with."""
    if not model.fixed_size or image_size in (None, model.image_size):
        return None
    return (
        f"image_size is {image_size} and this {model.family} takes images of {model.image_size} pixels alone; leave "
        "image_size out."
    )
