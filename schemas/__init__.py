"""The words of Millrace: one Avro record a file under `avro/`, and the codec that reads and writes them."""
