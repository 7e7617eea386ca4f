// What computes tiles inside a compute Worker, and what it computes: the one interface of all engines. The engines are in
// web/static/js/engines/; compute_worker.js drives one, choice.js proves and measures them all, tests/engines runs one
// suite over them.

/** How elements lie in memory, little-endian. i8 carries one float32 scale for each line and block of 128 along k. */
export type Dtype = "f32" | "bf16" | "f16" | "i8";

/** rowwise: errors of an ordinary float32 sum. normwise: small beside the largest element of the product, not beside each. */
export type Accuracy = "rowwise" | "normwise";

/** What a panel's bytes are: rows x columns elements, row-major; i8 with its scales behind (protocol.js, panelBytes). */
export interface PanelForm {
  rows: number;
  columns: number;
  dtype: Dtype;
}

/**
 * A matrix as it lies in bytes, in the panels' own sense: a line is a row of A or a column of B, an element of a line is
 * at `line * across + l * along` (elements, l runs over k). A panel as the wire carries it has across = k, along = 1.
 */
export interface Operand {
  bytes: Uint8Array<ArrayBuffer>;
  dtype: Dtype;
  across: number;
  along: number;
  /** i8 only: scale of element l of a line is scales[line * ceil(k / 128) + floor(l / 128)]. */
  scales?: Float32Array<ArrayBuffer>;
}

/** C[m,n] (+)= A[m,k] B[k,n] (+ bias[n] on every row). */
export interface Problem {
  m: number;
  n: number;
  k: number;
  a: Operand;
  b: Operand;
  /** Elements from one row of C to the next, >= n. */
  cRow: number;
  /** What C holds before, (m - 1) * cRow + n elements at least; with it the product is added. Elements between rows stay. */
  c?: Float32Array<ArrayBuffer>;
  bias?: Float32Array<ArrayBuffer>;
  accuracy: Accuracy;
}

/** One of the products whose sum a tile is: `k` long, its operands beginning at a row and column of two panels. */
export interface Term {
  k: number;
  a: string;
  b: string;
  aRow: number;
  aColumn: number;
  bRow: number;
  bColumn: number;
}

/**
 * The part of a lease that an engine needs: C_i[m,n], i < batch, the sum of its terms. A panel holds lines (rows of A,
 * columns of B) as its rows; where `byK`, its rows run along k. Entry i of a batch lies m (n, or k by k) rows further down.
 */
export interface TileWork {
  batch: number;
  m: number;
  n: number;
  aByK: boolean;
  bByK: boolean;
  terms: Term[];
  /** What the product is rounded to. */
  dtype: "f32" | "bf16" | "f16";
  accuracy: Accuracy;
}

/** A product on its way out: batch x m x n of the tile's dtype, in a buffer of its own; seconds in the kernel. */
export interface Product {
  bytes: Uint8Array<ArrayBuffer>;
  seconds: number;
}

export interface Engine {
  /** wasm-relaxed, wasm-strict, wasm-scalar, webgpu, pyodide, python. */
  readonly kernel: string;
  /** Tiles worth having in flight at once: 1 where computing blocks, 2 where copies overlap it. */
  readonly depth: number;
  /** What was measured or decided on this device, for its volunteer to read; "" when there is nothing to say. */
  readonly note: string;
  /** Bytes the engine holds now, and those of them in use. */
  readonly memory: { bytes: number; used: number };
  /** Keeps a panel. What finds no room is `lost`, and a tile that needs it fails with OutOfMemory. */
  put(id: string, bytes: Uint8Array<ArrayBuffer>, form: PanelForm): void;
  drop(ids: string[]): void;
  /** Panels that found no room, or went with a lost GPU, since the last call. */
  takeLost(): string[];
  /** Rejects with OutOfMemory, MissingPanel, EngineGone (errors.js) or what the kernel throws. */
  compute(work: TileWork): Promise<Product>;
  /** One product outside of any lease, of operands of any kind; tests and benches ask for it. Returns C, its gaps included. */
  multiply(problem: Problem): Promise<Float32Array<ArrayBuffer>>;
  /** Gives everything back. */
  close(): void;
}

/** What an engine needs to start. `remembered` is what the same engine asked to remember here last time, or null. */
export interface EngineOptions {
  /** What the engine's memory may grow to. */
  bytesMax: number;
  /** Address of web/static, with a slash at its end. */
  base: string;
  remembered: string | null;
  /** Stores a short text under the engine's name on this device (the WebGPU tuner's choice for this adapter). */
  remember: (text: string) => void;
}

/** Each engine's module has `open`; it rejects with a reason in words where the engine cannot run. */
export type Open = (options: EngineOptions) => Promise<Engine>;
