"""The errors of codecs."""


class CodecError(Exception):
    """These bytes, or this configuration, are not what the codec writes."""


class NotApplicable(CodecError):
    """The codec cannot represent these values exactly; another codec must."""
