// What a dedicated Worker's global scope offers, as far as the Workers here use it. TypeScript's own "webworker" library
// cannot be loaded beside "dom", and the pages need "dom".

export interface WorkerScope<In, Out> {
  onmessage: ((event: MessageEvent<In>) => void) | null;
  postMessage(message: Out, transfer?: Transferable[]): void;
}
