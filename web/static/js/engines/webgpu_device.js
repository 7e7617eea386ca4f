/**
 * Opens the GPU: an adapter, its device with the limits this engine wants as far as the adapter has them, and the text by
 * which an adapter is known again. What counts afterwards is device.limits, never adapter.limits.
 */

const BUFFER_BYTES_WANTED = 2 ** 30; // some drivers do nothing beyond 2^31
const SHARED_BYTES_WANTED = 32768;
/** @type {GPUFeatureName[]} */
const FEATURES = ["shader-f16", "subgroups"];

/** @returns {Promise<{ device: GPUDevice, identity: string }>} rejects with a reason in words */
export async function openDevice() {
  if (!navigator.gpu) throw new Error("this browser has no WebGPU here");
  const adapter = await navigator.gpu.requestAdapter({ powerPreference: "high-performance" });
  if (!adapter) throw new Error("this browser offers no GPU");
  const wanted = {
    maxBufferSize: BUFFER_BYTES_WANTED,
    maxStorageBufferBindingSize: BUFFER_BYTES_WANTED,
    maxComputeWorkgroupStorageSize: SHARED_BYTES_WANTED,
  };
  const requiredLimits = Object.fromEntries(Object.entries(wanted).map(([name, value]) =>
    [name, Math.min(value, adapter.limits[/** @type {keyof typeof wanted} */ (name)])]));
  const requiredFeatures = FEATURES.filter((feature) => adapter.features.has(feature));
  const device = await adapter.requestDevice({ requiredLimits, requiredFeatures });
  const { vendor, architecture, device: model, description } = adapter.info;
  return { device, identity: [vendor, architecture, model, description].filter(Boolean).join(" ") };
}
