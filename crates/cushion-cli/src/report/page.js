// Draws the page, in the order it is read.

drawFailures();
drawShortages();
drawHead();
drawFindings();
drawPolicies();
drawChart();
drawMaps();
drawLargest();
drawLifetimes();
drawNotes();
document.documentElement.dataset.drawn = "yes";
