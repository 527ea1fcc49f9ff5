package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// asProgram makes this program the command, or one that only uses its terminal.
const asProgram = "GPUAAS_TEST_PROGRAM"

func TestMain(m *testing.M) {
	switch os.Getenv(asProgram) {
	case "main":
		main()
	case "secret":
		secret, err := readSecret("Secret: ")
		fmt.Printf("%x %v\n", secret, err)
	case "raw":
		useTerminal()
	default:
		os.Exit(m.Run())
	}
	os.Exit(0)
}

// useTerminal says how large the terminal is, at first and after each of two changes, restores it and ends with the
// next line.
func useTerminal() {
	t, err := rawTerminal()
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	for n := range 3 {
		if n > 0 {
			<-t.Changed
		}
		size := t.Size()
		fmt.Printf("%d rows, %d columns\n", size.Rows, size.Columns)
	}
	t.Restore()
	fmt.Println("restored")
	_, _ = os.Stdin.Read(make([]byte, 1))
}

// terminal is a terminal of a process that runs in it.
type terminal struct {
	t    *testing.T
	side *os.File // what a person sees and types
	seen bytes.Buffer
	cmd  *exec.Cmd
}

func openTerminal(t *testing.T, rows, columns uint16) *terminal {
	t.Helper()
	side, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	require.NoError(t, err)
	t.Cleanup(func() { _ = side.Close() })
	w := &terminal{t: t, side: side}
	w.resize(rows, columns)
	return w
}

func (w *terminal) resize(rows, columns uint16) {
	w.t.Helper()
	size := &unix.Winsize{Row: rows, Col: columns}
	require.NoError(w.t, unix.IoctlSetWinsize(int(w.side.Fd()), unix.TIOCSWINSZ, size))
}

// start runs this program in the terminal, as its session's first process.
func (w *terminal) start(as string) {
	w.t.Helper()
	require.NoError(w.t, unix.IoctlSetPointerInt(int(w.side.Fd()), unix.TIOCSPTLCK, 0))
	number, err := unix.IoctlGetInt(int(w.side.Fd()), unix.TIOCGPTN)
	require.NoError(w.t, err)
	inside, err := os.OpenFile("/dev/pts/"+strconv.Itoa(number), os.O_RDWR|unix.O_NOCTTY, 0)
	require.NoError(w.t, err)
	defer func() { _ = inside.Close() }()
	w.cmd = exec.CommandContext(w.t.Context(), os.Args[0])
	w.cmd.Env = append(os.Environ(), asProgram+"="+as)
	w.cmd.Stdin, w.cmd.Stdout, w.cmd.Stderr = inside, inside, inside
	w.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	require.NoError(w.t, w.cmd.Start())
}

// await reads until the terminal has shown the text.
func (w *terminal) await(text string) {
	w.t.Helper()
	part := make([]byte, 1024)
	for !strings.Contains(w.seen.String(), text) {
		n, err := w.side.Read(part)
		require.NoError(w.t, err, "%q instead of %q", w.seen.String(), text)
		w.seen.Write(part[:n])
	}
}

// end reads the rest and waits for the program.
func (w *terminal) end() string {
	w.t.Helper()
	_, _ = io.Copy(&w.seen, w.side) // reading fails when the last process has closed the terminal
	require.NoError(w.t, w.cmd.Wait())
	return w.seen.String()
}

// raw reports whether keys reach the program as they are pressed, unseen.
func (w *terminal) raw() bool {
	w.t.Helper()
	attributes, err := unix.IoctlGetTermios(int(w.side.Fd()), unix.TCGETS)
	require.NoError(w.t, err)
	return attributes.Lflag&(unix.ICANON|unix.ECHO|unix.ISIG) == 0
}

func TestATerminalIsRawUntilItIsRestoredAndSaysItsSize(t *testing.T) {
	w := openTerminal(t, 50, 132)
	require.False(t, w.raw())
	w.start("raw")
	w.await("50 rows, 132 columns")
	require.True(t, w.raw())
	w.resize(10, 40)
	w.await("10 rows, 40 columns")
	w.resize(0, 0) // a terminal that does not know its size
	w.await("24 rows, 80 columns")
	w.await("restored")
	require.False(t, w.raw())
	_, err := io.WriteString(w.side, "\n")
	require.NoError(t, err)
	w.end()
}

func TestASecretIsAskedForAndNotShown(t *testing.T) {
	w := openTerminal(t, 24, 80)
	w.start("secret")
	w.await("Secret: ")
	require.Eventually(t, func() bool {
		attributes, err := unix.IoctlGetTermios(int(w.side.Fd()), unix.TCGETS)
		return err == nil && attributes.Lflag&unix.ECHO == 0
	}, 30*time.Second, time.Millisecond)
	_, err := io.WriteString(w.side, "hunter2\n")
	require.NoError(t, err)
	seen := w.end()
	require.Contains(t, seen, fmt.Sprintf("%x <nil>", "hunter2"))
	require.NotContains(t, seen, "hunter2")
}

func TestTheProgramEndsWithTheCommandsExitCode(t *testing.T) {
	run := func(args ...string) (string, int) {
		cmd := exec.CommandContext(t.Context(), os.Args[0], args...)
		cmd.Env = append(os.Environ(), asProgram+"=main", "HOME="+t.TempDir())
		out, _ := cmd.CombinedOutput()
		return string(out), cmd.ProcessState.ExitCode()
	}
	out, code := run("--version")
	require.Zero(t, code, out)
	require.Contains(t, out, version)
	out, code = run("frobnicate")
	require.Equal(t, 2, code)
	require.Contains(t, out, "no command")
}
