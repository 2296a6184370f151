"""Not a job: makes a tiny ImageNet and a tiny MNIST of noise, for PyTorch's examples."""

import sys
from pathlib import Path

import torch
from torchvision.io import write_png


def noise(highest, *shape):
    return torch.randint(0, highest, shape, dtype=torch.uint8)


def imagenet(place):
    for directory, count in (("train/a", 20), ("train/b", 20), ("val/a", 2), ("val/b", 2)):
        (place / directory).mkdir(parents=True)
        for number in range(count):
            write_png(noise(256, 3, 64, 64), str(place / directory / f"{number}.png"))


def mnist(place):
    place.mkdir(parents=True)
    for part, count in (("train", 640), ("t10k", 64)):
        for name, values in (
            ("images-idx3", noise(256, count, 28, 28)),
            ("labels-idx1", noise(10, count)),
        ):
            head = bytes((0, 0, 8, values.dim()))
            head += b"".join(size.to_bytes(4, "big") for size in values.shape)
            file = place / f"{part}-{name}-ubyte"
            file.write_bytes(head + bytes(values.flatten().tolist()))


if __name__ == "__main__":
    torch.manual_seed(0)
    imagenet(Path(sys.argv[1], "imagenet"))
    mnist(Path(sys.argv[1], "data", "MNIST", "raw"))
