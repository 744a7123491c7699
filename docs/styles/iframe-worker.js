// Search in pages that are read from the disk, where browsers refuse the worker that it runs in: a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.body.appendChild(document.createElement("iframe"))
      frame.hidden = true
      this.inner = frame.contentWindow
      this.inner.document.open() // else Firefox replaces the frame's document later
      this.inner.document.write("<!doctype html><body></body>")
      this.inner.document.close()
      const load = source => new Promise((resolve, reject) => {
        const script = this.inner.document.createElement("script")
        Object.assign(script, {src: source, onload: resolve, onerror: reject})
        this.inner.document.body.appendChild(script)
      })
      this.inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", {data}))
      this.inner.importScripts = (...sources) =>
        sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve())
      this.loaded = load(url)
    }

    postMessage(data) {
      this.loaded.then(() => this.inner.dispatchEvent(new MessageEvent("message", {data})))
    }
  }
}
