/**
 * What engines on this thread made and have not given back, whatever they say of it: GPU buffers, and memories of WASM
 * modules that nothing has collected yet. Must be imported before an engine is opened.
 */
let buffers = 0;
/** @type {WeakRef<WebAssembly.Memory>[]} */
const memories = [];
const { Memory, Instance, instantiate, instantiateStreaming } = WebAssembly;

function watch(values) {
  for (const value of values) if (value instanceof Memory) memories.push(new WeakRef(value));
}

const made = (instance) => {
  watch(Object.values(instance.exports));
  return instance;
};

WebAssembly.Memory = new Proxy(Memory, {
  construct(target, given) {
    const memory = new target(...given);
    watch([memory]);
    return memory;
  },
});
WebAssembly.Instance = new Proxy(Instance, { construct: (target, given) => made(new target(...given)) });
for (const [name, original] of Object.entries({ instantiate, instantiateStreaming })) {
  WebAssembly[name] = async (...given) => {
    const result = await original.apply(WebAssembly, given);
    made(result instanceof Instance ? result : result.instance);
    return result;
  };
}

if (globalThis.GPUDevice) {
  const { createBuffer, destroy: destroyDevice } = GPUDevice.prototype, { destroy } = GPUBuffer.prototype;
  /** @type {WeakMap<GPUBuffer, GPUDevice>} those not destroyed, and what they were made by */
  const makers = new WeakMap();
  /** @type {WeakMap<GPUDevice, number>} how many of them; a destroyed device takes its own along */
  const counts = new WeakMap();
  const change = (device, by) => {
    buffers += by;
    counts.set(device, (counts.get(device) ?? 0) + by);
  };
  GPUDevice.prototype.createBuffer = function counted(descriptor) {
    const buffer = createBuffer.call(this, descriptor);
    makers.set(buffer, this);
    change(this, 1);
    return buffer;
  };
  GPUBuffer.prototype.destroy = function counted() {
    const device = makers.get(this);
    if (makers.delete(this) && counts.get(device)) change(device, -1);
    destroy.call(this);
  };
  GPUDevice.prototype.destroy = function counted() {
    change(this, -(counts.get(this) ?? 0));
    destroyDevice.call(this);
  };
}

/** GPU buffers not destroyed; WASM memories, once each, that are alive after the last collection. */
export function alive() {
  return { gpuBuffers: buffers, wasmMemories: new Set(memories.map((memory) => memory.deref()).filter(Boolean)).size };
}
