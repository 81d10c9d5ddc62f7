"""Uploads in parts that a killed process did not complete: stores keep the parts, and charge for them."""

import os
from contextlib import closing, suppress


def abort_uploads(url: str, folder: str, key: str = "") -> int | None:
    """Abort the uploads below a folder of a bucket of S3, and that of the object `key`; their number.

    None if that cannot be done from here: other stores remove such parts by themselves or by a rule of the bucket, and
    the client of Amazon (`boto3`) may not be installed or may not be allowed to.
    """
    scheme, _, bucket = url.partition("://")
    if scheme != "s3":
        return None
    try:
        import boto3
        from botocore.exceptions import BotoCoreError, ClientError
    except ModuleNotFoundError:
        return None
    aborted = 0
    with (
        suppress(BotoCoreError, ClientError),
        closing(boto3.client("s3", region_name=os.environ.get("AWS_REGION"))) as s3,
    ):
        for page in s3.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=folder or key):
            for upload in page.get("Uploads", ()):
                if upload["Key"] == key or upload["Key"].startswith(f"{folder}/"):
                    s3.abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
                    aborted += 1
        return aborted
    return None
