"""Models: built by name or by the user's function, first weights from elsewhere, and what BatchNorm asks for."""

from trainer.models.batchnorm import check_batchnorm, sync_batchnorm
from trainer.models.build import Cnn, build_model, fit_first_convolution
from trainer.models.weights import find_head, fit_weights, freeze_backbone, read_file, read_torchvision, strip_prefixes

__all__ = [
    "Cnn",
    "build_model",
    "check_batchnorm",
    "find_head",
    "fit_first_convolution",
    "fit_weights",
    "freeze_backbone",
    "read_file",
    "read_torchvision",
    "strip_prefixes",
    "sync_batchnorm",
]
