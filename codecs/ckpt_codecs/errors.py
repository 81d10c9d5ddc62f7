"""What can go wrong in a codec."""


class CodecError(Exception):
    """These bytes, or this configuration, are not what the codec wrote."""


class NotApplicable(CodecError):
    """The codec cannot hold these values exactly; another must."""
