"""The trace format: schema, codec, writer, reader, manifest, verification."""
