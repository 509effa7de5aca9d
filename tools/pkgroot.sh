# Sourced. Sets PKGROOT to a folder whose entry `fusewright` is this checkout, for PYTHONPATH and
# MYPYPATH: the repository root is the package, whatever the checkout's own folder is called.
PKGROOT="$PWD/build/pkgroot"
mkdir -p "$PKGROOT"
ln -sfn "$PWD" "$PKGROOT/fusewright"
