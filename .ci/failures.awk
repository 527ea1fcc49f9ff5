# Prints what failed in a log of go test: of each failed test its name, its assertions, and its last 15 lines.

function flush(i, from) {
  from = lines > 15 ? lines - 14 : 1
  if (from <= printed) from = printed + 1
  for (i = from; i <= lines; i++) print "  " line[i]
  lines = printed = 0
}

/^ *--- FAIL/ { flush(); failing = 1 }
/^FAIL\t/ || /^(ok|---|\?) / && !/^--- FAIL/ { flush(); failing = 0 }
/^(panic: |fatal error: |WARNING: DATA RACE)/ { failing = 1 }
failing {
  line[++lines] = $0
  # Testify indents every line of an assertion with spaces and a tab.
  assertion = /Error Trace:/ || assertion && /^ +\t/
  if (assertion || /--- FAIL/) { print "  " $0; printed = lines }
}
END { flush() }
