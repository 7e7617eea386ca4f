/**
 * An ONNX model in bytes: Y = A B B ... B, a chain of MatMul nodes over two n x n float32 inputs A and B.
 *
 * ONNX files are protobuf. A message is a list of fields: a key (field number * 8 + wire type), then a varint (type 0) or
 * a length and so many bytes (type 2). The numbers are those of onnx.proto:
 *
 *   ModelProto  ir_version = 1, graph = 7, opset_import = 8       OperatorSetIdProto  version = 2
 *   GraphProto  node = 1, name = 2, input = 11, output = 12       NodeProto  input = 1, output = 2, op_type = 4
 *   ValueInfoProto  name = 1, type = 2    TypeProto  tensor_type = 1    Tensor  elem_type = 1, shape = 2
 *   TensorShapeProto  dim = 1             Dimension  dim_value = 1
 */

const FLOAT = 1;
const IR_VERSION = 8;
const OPSET = 13;

/** @param {number} value */
function varint(value) {
  const bytes = [];
  for (; value > 127; value = Math.floor(value / 128)) bytes.push((value % 128) | 128);
  return [...bytes, value];
}

/** @param {number} number @param {number} value */
const whole = (number, value) => [...varint(number * 8), ...varint(value)];

/** @param {number} number @param {number[]} bytes */
const block = (number, bytes) => [...varint(number * 8 + 2), ...varint(bytes.length), ...bytes];

/** @param {number} number @param {string} text */
const words = (number, text) => block(number, [...new TextEncoder().encode(text)]);

/** An n x n float32 tensor of that name. @param {number} number @param {string} name @param {number} n */
function matrix(number, name, n) {
  const dimension = block(1, whole(1, n));
  const tensor = [...whole(1, FLOAT), ...block(2, [...dimension, ...dimension])];
  return block(number, [...words(1, name), ...block(2, block(1, tensor))]);
}

/** Inputs "a" and "b", output "y". @param {number} n @param {number} factors how many times B @returns {Uint8Array} */
export function chainModel(n, factors) {
  const between = (/** @type {number} */ i) => (i === 0 ? "a" : i === factors ? "y" : `c${i}`);
  const nodes = Array.from({ length: factors }, (_, i) =>
    block(1, [...words(1, between(i)), ...words(1, "b"), ...words(2, between(i + 1)), ...words(4, "MatMul")]),
  ).flat();
  const graph = [...nodes, ...words(2, "chain"), ...matrix(11, "a", n), ...matrix(11, "b", n), ...matrix(12, "y", n)];
  return Uint8Array.from([...whole(1, IR_VERSION), ...block(7, graph), ...block(8, whole(2, OPSET))]);
}
