// Package appkit is what an app team needs between a built program and a registered artifact: a key pair, a
// reproducible image, its signature, the push, and the signed manifest. The command line, the demo and the starter pack
// share it. It asks the hub for nothing: credentials, repository and trust come from the caller.
package appkit
