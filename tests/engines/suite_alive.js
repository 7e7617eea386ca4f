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
  const { createBuffer } = GPUDevice.prototype, { destroy } = GPUBuffer.prototype;
  const alive = new WeakSet();
  GPUDevice.prototype.createBuffer = function counted(descriptor) {
    const buffer = createBuffer.call(this, descriptor);
    alive.add(buffer);
    buffers += 1;
    return buffer;
  };
  GPUBuffer.prototype.destroy = function counted() {
    if (alive.delete(this)) buffers -= 1;
    destroy.call(this);
  };
}

/** GPU buffers not destroyed; WASM memories, once each, that are alive after the last collection. */
export function alive() {
  return { gpuBuffers: buffers, wasmMemories: new Set(memories.map((memory) => memory.deref()).filter(Boolean)).size };
}
