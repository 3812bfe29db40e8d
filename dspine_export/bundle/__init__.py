"""The output directory: atomic, locked, hashed, relocatable."""

from dspine_export.bundle.failures import require_free_space
from dspine_export.bundle.hashing import inventory, sha256_of
from dspine_export.bundle.manifest import (
    DrafterSummary,
    EngineEntry,
    EntryContract,
    FileEntry,
    Manifest,
    SourceFile,
    StageRecord,
    TensorSpec,
    VerificationResult,
)
from dspine_export.bundle.reader import Bundle, is_bundle, open_bundle
from dspine_export.bundle.staging import check_output, staged_bundle, write_manifest

__all__ = [
    "Bundle",
    "DrafterSummary",
    "EngineEntry",
    "EntryContract",
    "FileEntry",
    "Manifest",
    "SourceFile",
    "StageRecord",
    "TensorSpec",
    "VerificationResult",
    "check_output",
    "inventory",
    "is_bundle",
    "open_bundle",
    "require_free_space",
    "sha256_of",
    "staged_bundle",
    "write_manifest",
]
