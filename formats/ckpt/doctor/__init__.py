"""Does ckpt work on this machine and in this folder, and what is missing for which feature?"""

from ckpt.doctor.examination import Examination, examine

__all__ = ["Examination", "examine"]
