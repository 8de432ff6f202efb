from enum import Enum

class AttnBackend(Enum):
    auto = ...
