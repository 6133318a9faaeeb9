// Plays every video of a case on the same frame, and draws the line between dense and sparse.

// Videos drift apart by their decoders' start-up; more than this is seen as a different frame.
const MAX_DRIFT = 0.02; // seconds

function blobUrl(uri, cache) {
  if (!cache.has(uri)) {
    const comma = uri.indexOf(",");
    const bytes = Uint8Array.from(atob(uri.slice(comma + 1)), (character) => character.charCodeAt(0));
    const type = uri.slice(5, uri.indexOf(";"));
    cache.set(uri, URL.createObjectURL(new Blob([bytes], { type })));
  }
  return cache.get(uri);
}

// One clock for many videos: the first one that is loaded leads, the others follow.
class Clock {
  constructor(videos, frames, onFrame) {
    this.videos = videos;
    this.frames = frames;
    this.onFrame = onFrame;
    this.frame = 0;
    this.playing = false;
    this.rate = 1;
    for (const video of videos) video.addEventListener("loadedmetadata", () => this.join(video));
  }

  get loaded() {
    return this.videos.filter((video) => video.readyState >= 1 && video.duration > 0);
  }

  // A video that was just loaded takes the frame, the speed and the state of the others.
  join(video) {
    video.playbackRate = this.rate;
    this.moveTo(video);
    if (this.playing) this.start(video);
  }

  // To the middle of the frame: a time on its edge may show the one before.
  moveTo(video) {
    video.currentTime = ((this.frame + 0.5) / this.frames) * video.duration;
  }

  start(video) {
    video.play().catch(() => {}); // refused when the source is exchanged meanwhile: join() follows
  }

  play() {
    this.playing = true;
    this.loaded.forEach(this.start);
    this.schedule();
  }

  schedule() {
    this.request = requestAnimationFrame(() => this.tick());
  }

  pause() {
    this.playing = false;
    cancelAnimationFrame(this.request);
    for (const video of this.videos) video.pause();
    this.seek(this.frame);
  }

  seek(frame) {
    this.frame = frame;
    for (const video of this.loaded) this.moveTo(video);
    this.onFrame(frame);
  }

  setRate(rate) {
    this.rate = rate;
    for (const video of this.videos) video.playbackRate = rate;
  }

  tick() {
    const [leader, ...others] = this.loaded;
    for (const video of others) {
      const apart = Math.abs(video.currentTime - leader.currentTime);
      const drift = Math.min(apart, leader.duration - apart); // across the loop's end
      if (drift > MAX_DRIFT && !video.seeking) video.currentTime = leader.currentTime;
    }
    if (leader) {
      const share = leader.currentTime / leader.duration;
      this.frame = Math.min(this.frames - 1, Math.floor(share * this.frames));
      this.onFrame(this.frame);
    }
    this.schedule();
  }
}

function showClip(video, absent, clip, cache) {
  video.hidden = !clip.uri;
  absent.hidden = Boolean(clip.uri);
  absent.textContent = clip.note;
  if (!clip.uri) {
    video.removeAttribute("src");
    video.load(); // forgets the video it had
    return;
  }
  const url = blobUrl(clip.uri, cache);
  if (video.src !== url) video.src = url;
}

function setUpDivider(stage, divider) {
  const move = (percent) => {
    const value = Math.max(0, Math.min(100, percent));
    stage.style.setProperty("--cut", `${value}%`);
    divider.setAttribute("aria-valuenow", Math.round(value));
    divider.setAttribute("aria-valuetext", `${Math.round(value)} % dense`);
  };
  const follow = (event) => {
    const box = stage.getBoundingClientRect();
    move(((event.clientX - box.left) / box.width) * 100);
  };
  stage.addEventListener("pointerdown", (event) => {
    stage.setPointerCapture(event.pointerId);
    follow(event);
  });
  stage.addEventListener("pointermove", (event) => {
    if (stage.hasPointerCapture(event.pointerId)) follow(event);
  });
  const steps = { ArrowLeft: -2, ArrowDown: -2, ArrowRight: 2, ArrowUp: 2, PageDown: -10, PageUp: 10, Home: -100, End: 100 };
  divider.addEventListener("keydown", (event) => {
    if (!(event.key in steps)) return;
    event.preventDefault();
    move(Number(divider.getAttribute("aria-valuenow")) + steps[event.key]);
  });
  move(50);
}

function setUpTransport(clock) {
  const play = byId("play");
  const scrub = byId("scrub");
  scrub.max = clock.frames - 1;
  clock.seek(0);
  const show = () => (play.textContent = clock.playing ? "Pause" : "Play");
  play.addEventListener("click", () => {
    clock.playing ? clock.pause() : clock.play();
    show();
  });
  scrub.addEventListener("input", () => {
    const frame = Number(scrub.value);
    clock.pause();
    clock.seek(frame);
    show();
  });
  byId("speed").addEventListener("change", (event) => clock.setRate(Number(event.target.value)));
}

function fillFacts(dense, sparse) {
  const rows = sparse.facts.map(([title, text]) => {
    const row = document.createElement("tr");
    const head = document.createElement("th");
    head.scope = "row";
    head.textContent = title;
    const cells = [dense?.facts.find(([name]) => name === title)?.[1] ?? "–", text].map((content) => {
      const cell = document.createElement("td");
      cell.textContent = content;
      return cell;
    });
    row.append(head, ...cells);
    return row;
  });
  byId("facts").replaceChildren(...rows);
}

function setUpVideos({ cases, variants, clips, frames }) {
  const cache = new Map();
  const stage = byId("stage");
  const [caseChoice, variantChoice] = [byId("case"), byId("variant")];
  const denseIndex = variants.findIndex((variant) => variant.dense);
  const reel = [...document.querySelectorAll("#reel .clip")];
  const videos = [...document.querySelectorAll("#videos video")];
  const clock = new Clock(videos, Number(frames) || 100, (frame) => {
    byId("scrub").value = frame;
    byId("clock").textContent = frames ? `${frame + 1} of ${frames}` : `${frame + 1} %`;
  });

  const show = () => {
    const line = clips[Number(caseChoice.value)];
    const chosen = Number(variantChoice.value || denseIndex);
    const dense = line[denseIndex];
    const sparse = line[chosen];
    const note = byId("stage-note");
    showClip(byId("dense-video"), note, dense ?? { note: "no dense run" }, cache);
    showClip(byId("sparse-video"), note, sparse, cache);
    note.textContent = dense?.uri ? (sparse.uri ? "" : sparse.note) : (dense?.note ?? "no dense run");
    note.hidden = !note.textContent;
    byId("sparse-tag").textContent = byId("facts-head").textContent = variants[chosen].name;
    byId("prompt").textContent = cases[Number(caseChoice.value)];
    fillFacts(dense, sparse);
    for (const [index, button] of reel.entries()) {
      button.setAttribute("aria-pressed", index === chosen);
      showClip(button.querySelector("video"), button.querySelector(".absent"), line[index], cache);
    }
  };

  byId("dense-video").addEventListener("loadedmetadata", ({ target }) => {
    const aspect = target.videoWidth / target.videoHeight;
    for (const part of document.querySelectorAll(".wipe, .reel")) part.style.setProperty("--aspect", aspect);
  });
  caseChoice.addEventListener("change", show);
  variantChoice.addEventListener("change", show);
  for (const [index, button] of reel.entries()) {
    button.addEventListener("click", () => {
      variantChoice.value = index;
      show();
    });
  }
  setUpDivider(stage, byId("divider"));
  setUpTransport(clock);
  show();
}
