"""Whether a file's own format proves that it was written to its end. No content is ever loaded.

verify           the check by format
verdict          its result
archives         zip (.pt, .npz, .keras), tar
compressed       gzip, bzip2, xz
arrays           safetensors, .npy, HDF5
length_prefixed  ONNX, msgpack, UBJSON, Zstandard
pickles          pickle, opcode by opcode
json_text        JSON
tf_bundle        TensorFlow's checkpoint bundle
multi_file       checkpoints of several files
"""
