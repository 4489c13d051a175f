// Draws the page, in reading order.

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
