// Draws the page, in the order it is read.

drawFailures();
drawHead();
drawFindings();
drawPolicies();
drawChart();
drawMaps();
drawLargest();
drawLifetimes();
drawNotes();
document.documentElement.dataset.drawn = "yes";
