"""Unfinished multipart uploads, which are not objects but take up space."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pipeline.store.base import ObjectInfo, ObjectMissingError
from pipeline.store.s3_client import S3Client, UploadGoneError

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client as BotoClient
    from mypy_boto3_s3.type_defs import (
        ListMultipartUploadsOutputTypeDef,
        ListPartsOutputTypeDef,
        MultipartUploadTypeDef,
    )


def unfinished_uploads(client: S3Client, root: str, prefix: str) -> Iterator[ObjectInfo]:
    """Yield the unfinished uploads of keys below `root + prefix`.

    Args:
        client: Client of the bucket.
        root: Prefix of the store in the bucket.
        prefix: Prefix of the keys in the store.

    Yields:
        Each upload, with the total size of its parts and the time of its latest part.
    """
    # List the uploads of the whole bucket, because MinIO treats a prefix as the full name of an
    # object.
    key_marker = upload_marker = ""
    while True:
        page = _uploads(client, prefix, key_marker, upload_marker)
        for item in page.get("Uploads", ()):
            if item["Key"].startswith(root + prefix):
                yield _with_parts(client, item, item["Key"].removeprefix(root))
        if not page["IsTruncated"]:
            return
        key_marker, upload_marker = page["NextKeyMarker"], page["NextUploadIdMarker"]


def discard_upload(client: S3Client, full_key: str, upload: str) -> None:
    """Abort an upload. It is not an error if the upload is gone.

    Args:
        client: Client of the bucket.
        full_key: Key in the bucket.
        upload: Id of the upload.
    """

    def request(boto: "BotoClient") -> None:
        boto.abort_multipart_upload(Bucket=client.bucket, Key=full_key, UploadId=upload)

    try:
        client.call(f"discard {full_key}", "AbortMultipartUpload", request)
    except UploadGoneError:
        return


def _with_parts(client: S3Client, item: "MultipartUploadTypeDef", key: str) -> ObjectInfo:
    size, modified_s, marker = 0, item["Initiated"].timestamp(), 0
    while True:
        try:
            page = _parts(client, item, marker)
        except (UploadGoneError, ObjectMissingError):  # the upload has ended since it was listed
            break
        for part in page.get("Parts", ()):
            size += part["Size"]
            modified_s = max(modified_s, part["LastModified"].timestamp())
        if not page["IsTruncated"]:
            break
        marker = page["NextPartNumberMarker"]
    return ObjectInfo(key, size, modified_s, item["UploadId"])


def _uploads(
    client: S3Client, prefix: str, key_marker: str, upload_marker: str
) -> "ListMultipartUploadsOutputTypeDef":
    def request(boto: "BotoClient") -> "ListMultipartUploadsOutputTypeDef":
        if not key_marker:
            return boto.list_multipart_uploads(Bucket=client.bucket)
        return boto.list_multipart_uploads(
            Bucket=client.bucket, KeyMarker=key_marker, UploadIdMarker=upload_marker
        )

    return client.call(f"list {prefix}", "ListMultipartUploads", request)


def _parts(
    client: S3Client, item: "MultipartUploadTypeDef", marker: int
) -> "ListPartsOutputTypeDef":
    def request(boto: "BotoClient") -> "ListPartsOutputTypeDef":
        return boto.list_parts(
            Bucket=client.bucket,
            Key=item["Key"],
            UploadId=item["UploadId"],
            PartNumberMarker=marker,
        )

    return client.call(f"list {item['Key']}", "ListParts", request)
