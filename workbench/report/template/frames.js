// Recorded sweeps: shows the controls, and of the frames the one that they stand for.
for (const sweep of document.querySelectorAll("section.frames")) {
  const controls = [...sweep.querySelectorAll("[data-stride]")];
  const frames = sweep.querySelectorAll(".frame");
  const show = () => {
    const place = controls.reduce((sum, control) => sum + control.value * control.dataset.stride, 0);
    frames.forEach((frame, i) => { frame.hidden = i !== place; });
    for (const slider of sweep.querySelectorAll("input[type=range]")) {
      const row = slider.closest("label");
      const label = row.querySelectorAll(".labels span")[slider.value].textContent;
      row.querySelector("output").textContent = label;
      slider.setAttribute("aria-valuetext", label);
    }
  };
  controls.forEach((control) => control.addEventListener("input", show));
  sweep.classList.add("running");
  sweep.querySelector(".controls").hidden = false;
  show();
}
